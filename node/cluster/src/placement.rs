//! Where things live, as a pure function: everything that outlives a request has a home shard.

use sha2::{Digest as _, Sha256};

/// The home shard of something with this name.
pub fn shard_of(name: &[u8], shards: u16) -> u16 {
    let digest = Sha256::digest(name);
    let first = u64::from_be_bytes(std::array::from_fn(|byte| digest[byte]));
    u16::try_from(first % u64::from(shards.max(1))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_spread_evenly_and_stay_where_they_are() {
        let mut homes = [0_u32; 8];
        for name in 0..8000_u32 {
            homes[usize::from(shard_of(&name.to_be_bytes(), 8))] += 1;
        }
        assert!(homes.iter().all(|count| (850..1150).contains(count)), "{homes:?}");
        assert_eq!(shard_of(b"agent_1", 8), shard_of(b"agent_1", 8));
        assert_eq!(shard_of(b"agent_1", 1), 0);
    }
}
