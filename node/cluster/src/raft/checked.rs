//! Every row and entry on disk stands behind a checksum of itself and its key. redb checks its pages when
//! it repairs a file, not whenever it reads one; a disk that lies about old bytes is found out here,
//! before what it says is believed or told to anybody.

use std::io;

/// Bytes of the checksum.
pub const SUM_BYTES: usize = 4;

/// The checksum of these bytes under this key.
pub fn sum_of(key: &[u8], bytes: &[u8]) -> [u8; SUM_BYTES] {
    crc32c::crc32c_append(crc32c::crc32c(key), bytes).to_be_bytes()
}

/// What stands on disk for these bytes.
pub fn write(key: &[u8], bytes: &[u8]) -> Vec<u8> {
    [&sum_of(key, bytes), bytes].concat()
}

/// The bytes, if they are what was written under this key.
pub fn read<'b>(key: &[u8], stored: &'b [u8]) -> io::Result<&'b [u8]> {
    let (sum, bytes) = stored.split_first_chunk::<SUM_BYTES>().ok_or_else(damaged)?;
    if *sum == sum_of(key, bytes) { Ok(bytes) } else { Err(damaged()) }
}

/// [`Damaged`], as whoever reads or opens a file says it.
pub fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Damaged)
}

/// The disk gave back something else than it was given.
#[derive(Debug, thiserror::Error)]
#[error(
    "the disk gave back other bytes than were written: nothing of this folder can be trusted. Where other nodes \
     have what it had, `roost rejoin` makes it anew from them; a single node is restored from a backup"
)]
pub struct Damaged;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_flipped_bit_is_found_in_row_and_key() {
        let (key, bytes) = (b"key".to_vec(), b"some bytes of a row".to_vec());
        let stored = write(&key, &bytes);
        assert_eq!(read(&key, &stored).expect("whole"), bytes);
        for bit in 0..stored.len() * 8 {
            let mut other = stored.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&key, &other).is_err(), "bit {bit}");
        }
        for bit in 0..key.len() * 8 {
            let mut other = key.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&other, &stored).is_err(), "bit {bit} of the key");
        }
        assert!(read(&key, b"abc").is_err());
    }
}
