//! What one sync makes durable together: a head, then records. The checksum covers both, the place in the stream
//! and the file's salt, so that nothing else passes for a frame: no older one in a segment that is used again, and
//! no bytes that somebody had stored.

use std::io;

use crate::raft::checked::damaged;

/// Bytes before the records.
pub(super) const HEAD: usize = 32;
/// Frames begin at multiples of this.
const ALIGNED: usize = 8;
const MAGIC: u32 = 0x4D52_4652;

const ENTRY: u8 = 1;
const MARK: u8 = 2;
const TRUNCATE: u8 = 3;
const PURGE: u8 = 4;
const FORGET: u8 = 5;

/// What a frame changes. Places count from the frame's first byte.
#[derive(Debug, PartialEq, Eq)]
pub enum Change {
    /// An entry is there; one that was there before has moved.
    Entry {
        /// Whose.
        group: u16,
        /// Its number.
        index: u64,
        /// Where its bytes are.
        at: u32,
        /// How many.
        length: u32,
    },
    /// A mark is now this.
    Mark {
        /// Whose.
        group: u16,
        /// Which.
        which: u8,
        /// What.
        bytes: Vec<u8>,
    },
    /// Entries from this one on are gone.
    Truncate {
        /// Whose.
        group: u16,
        /// The first.
        from: u64,
    },
    /// Entries up to this one are gone.
    Purge {
        /// Whose.
        group: u16,
        /// The last.
        upto: u64,
    },
    /// Everything of the group is gone.
    Forget {
        /// Whose.
        group: u16,
    },
}

/// A frame that is being made.
#[derive(Debug)]
pub struct Frame {
    bytes: Vec<u8>,
    /// What it changes.
    pub changes: Vec<Change>,
}

impl Default for Frame {
    fn default() -> Self {
        Self { bytes: vec![0; HEAD], changes: vec![] }
    }
}

fn short(length: usize) -> u32 {
    u32::try_from(length).expect("a frame is far below four gigabytes")
}

impl Frame {
    /// An empty one that uses the room of these bytes.
    pub(super) fn within(mut bytes: Vec<u8>) -> Self {
        bytes.clear();
        bytes.resize(HEAD, 0);
        Self { bytes, changes: vec![] }
    }

    /// Its bytes, whose room may be used again, and what it changes.
    pub(super) fn apart(self) -> (Vec<u8>, Vec<Change>) {
        (self.bytes, self.changes)
    }

    /// Whether nothing was put into it.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Bytes so far.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    fn start(&mut self, kind: u8, group: u16, number: u64) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(&group.to_le_bytes());
        self.bytes.extend_from_slice(&number.to_le_bytes());
    }

    fn put(&mut self, bytes: &[&[u8]]) -> (u32, u32) {
        let length = short(bytes.iter().map(|part| part.len()).sum());
        self.bytes.extend_from_slice(&length.to_le_bytes());
        let at = short(self.bytes.len());
        bytes.iter().for_each(|part| self.bytes.extend_from_slice(part));
        (at, length)
    }

    /// Puts another frame's records behind those of this one.
    pub fn append(&mut self, other: Self) {
        let shift = short(self.bytes.len() - HEAD);
        self.bytes.extend_from_slice(&other.bytes[HEAD..]);
        self.changes.extend(other.changes.into_iter().map(|change| match change {
            Change::Entry { group, index, at, length } => {
                Change::Entry { group, index, at: at + shift, length }
            }
            change @ (Change::Mark { .. }
            | Change::Truncate { .. }
            | Change::Purge { .. }
            | Change::Forget { .. }) => change,
        }));
    }

    /// Appends an entry, whose bytes may come in parts.
    pub fn entry(&mut self, group: u16, index: u64, parts: &[&[u8]]) {
        self.start(ENTRY, group, index);
        let (at, length) = self.put(parts);
        self.changes.push(Change::Entry { group, index, at, length });
    }

    /// Appends an entry, whose bytes are written behind those that are there.
    pub fn entry_with(&mut self, group: u16, index: u64, write: impl FnOnce(&mut Vec<u8>)) {
        self.start(ENTRY, group, index);
        let place = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        let at = self.bytes.len();
        write(&mut self.bytes);
        let length = short(self.bytes.len() - at);
        self.bytes[place..at].copy_from_slice(&length.to_le_bytes());
        self.changes.push(Change::Entry { group, index, at: short(at), length });
    }

    /// Sets a mark.
    pub fn mark(&mut self, group: u16, which: u8, bytes: &[u8]) {
        self.start(MARK, group, u64::from(which));
        self.put(&[bytes]);
        self.changes.push(Change::Mark { group, which, bytes: bytes.to_vec() });
    }

    /// Takes entries away from the end.
    pub fn truncate(&mut self, group: u16, from: u64) {
        self.start(TRUNCATE, group, from);
        self.changes.push(Change::Truncate { group, from });
    }

    /// Takes entries away from the beginning.
    pub fn purge(&mut self, group: u16, upto: u64) {
        self.start(PURGE, group, upto);
        self.changes.push(Change::Purge { group, upto });
    }

    /// Takes everything of a group away.
    pub fn forget(&mut self, group: u16) {
        self.start(FORGET, group, 0);
        self.changes.push(Change::Forget { group });
    }

    /// The bytes for this place in the stream, where `oldest` is the first segment that is needed.
    pub fn sealed(&mut self, at: u64, oldest: u64, salt: u64) -> &[u8] {
        let length = short(self.bytes.len() - HEAD);
        self.bytes.resize(whole(self.bytes.len()), 0);
        self.bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        self.bytes[8..16].copy_from_slice(&at.to_le_bytes());
        self.bytes[16..24].copy_from_slice(&oldest.to_le_bytes());
        self.bytes[24..28].copy_from_slice(&length.to_le_bytes());
        let sum = sum_of(&self.bytes[8..HEAD + length as usize], salt);
        self.bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        &self.bytes
    }
}

fn sum_of(bytes: &[u8], salt: u64) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&salt.to_le_bytes()), bytes)
}

/// The bytes that a frame of this length takes.
fn whole(length: usize) -> usize {
    length.next_multiple_of(ALIGNED)
}

/// What a frame's head says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    at: u64,
    sum: u32,
    /// The first segment that was needed when it was written.
    pub(super) oldest: u64,
    length: usize,
}

fn number(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn small(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

impl Head {
    /// Reads the head of the frame at this place; `None` if there is none.
    pub(super) fn read(bytes: &[u8], at: u64) -> Option<Self> {
        if bytes.len() < HEAD || small(bytes, 0) != MAGIC || number(bytes, 8) != at {
            return None;
        }
        let length = usize::try_from(small(bytes, 24)).ok()?;
        Some(Self { at, sum: small(bytes, 4), oldest: number(bytes, 16), length })
    }

    /// The bytes of the frame, head and all, without what fills it up.
    pub(super) fn bytes(&self) -> usize {
        HEAD + self.length
    }

    /// Where the next frame begins.
    pub(super) fn next(&self) -> u64 {
        self.at + whole(self.bytes()) as u64
    }

    /// Whether these are the frame's bytes.
    pub(super) fn is_of(&self, bytes: &[u8], salt: u64) -> bool {
        bytes.get(8..self.bytes()).is_some_and(|rest| sum_of(rest, salt) == self.sum)
    }
}

/// The place that a frame says it has, if this looks like the beginning of one.
pub(super) fn place_of(bytes: &[u8]) -> Option<u64> {
    (bytes.len() >= HEAD && small(bytes, 0) == MAGIC).then(|| number(bytes, 8))
}

/// Where a frame may begin inside a segment.
pub(super) fn places(length: usize) -> impl Iterator<Item = usize> {
    (0..length).step_by(ALIGNED)
}

/// What a whole frame changes.
pub(super) fn changes(frame: &[u8]) -> io::Result<Vec<Change>> {
    let mut rest = Rest { frame, at: HEAD };
    let mut found = vec![];
    while rest.at < frame.len() {
        found.push(rest.change()?);
    }
    Ok(found)
}

struct Rest<'f> {
    frame: &'f [u8],
    at: usize,
}

impl<'f> Rest<'f> {
    fn take(&mut self, length: usize) -> io::Result<&'f [u8]> {
        let end = self.at.checked_add(length).ok_or_else(damaged)?;
        let taken = self.frame.get(self.at..end).ok_or_else(damaged)?;
        self.at = end;
        Ok(taken)
    }

    fn put(&mut self) -> io::Result<(u32, &'f [u8])> {
        let length = small(self.take(4)?, 0);
        let at = short(self.at);
        Ok((at, self.take(usize::try_from(length).map_err(|_| damaged())?)?))
    }

    fn change(&mut self) -> io::Result<Change> {
        let start = self.take(11)?;
        let (kind, group, number) =
            (start[0], u16::from_le_bytes([start[1], start[2]]), number(start, 3));
        Ok(match kind {
            ENTRY => {
                let (at, bytes) = self.put()?;
                Change::Entry { group, index: number, at, length: short(bytes.len()) }
            }
            MARK => {
                let which = u8::try_from(number).map_err(|_| damaged())?;
                Change::Mark { group, which, bytes: self.put()?.1.to_vec() }
            }
            TRUNCATE => Change::Truncate { group, from: number },
            PURGE => Change::Purge { group, upto: number },
            FORGET => Change::Forget { group },
            _ => return Err(damaged()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> Frame {
        let mut frame = Frame::default();
        frame.entry(3, 7, &[b"so", b"me"]);
        frame.entry(4, 1, &[]);
        frame.mark(3, 2, b"vote");
        frame.truncate(3, 8);
        frame.purge(4, 0);
        frame.forget(9);
        frame
    }

    #[test]
    fn what_was_written_is_read_back() {
        let mut frame = full();
        let bytes = frame.sealed(64, 5, 1).to_vec();
        let head = Head::read(&bytes, 64).expect("it is one");
        assert!(head.is_of(&bytes, 1));
        assert_eq!((head.oldest, head.next()), (5, 64 + bytes.len() as u64));
        assert_eq!(changes(&bytes[..head.bytes()]).expect("readable"), frame.changes);
    }

    #[test]
    fn nothing_else_passes_for_a_frame() {
        let bytes = full().sealed(64, 5, 1).to_vec();
        let is_one = |bytes: &[u8], at, salt| {
            Head::read(bytes, at).is_some_and(|head| head.is_of(bytes, salt))
        };
        assert!(is_one(&bytes, 64, 1));
        assert!(!is_one(&bytes, 72, 1), "another place");
        assert!(!is_one(&bytes, 64, 2), "another file");
        let length = Head::read(&bytes, 64).expect("it is one").bytes();
        for bit in 0..length * 8 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_one(&other, 64, 1), "bit {bit}");
        }
        assert!(!is_one(&bytes[..length - 1], 64, 1), "cut off");
    }
}
