//! The file behind the logs of all groups: written at its end only, synced once for all that waits.
//!
//! The file is one stream in segments of equal size. A segment whose records are all out of date is written over,
//! so once the file has its size a sync writes data and nothing else. What an old segment still has of groups that
//! rest is written again at the end when it stands in the way. Where everything is stands in memory.
//!
//! What a cut of the power leaves of the last frame is not a frame, and is cut off. If frames follow one that is
//! not whole, the file was damaged later, and is not opened: each was synced before the next was written.

mod file;
mod frame;
mod recover;

use std::{
    collections::BTreeMap,
    fmt::Debug,
    io,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use redb::StorageBackend;

pub use self::{file::WholeFile, frame::Frame};
use self::{
    frame::{Change, Head},
    recover::{read_head, recover},
};
use super::checked::damaged;

/// Bytes of a segment, unless a file was made with others.
pub const SEGMENT_BYTES: u64 = 4 * 1024 * 1024;
/// Bytes of the file's own head.
const FILE_HEAD: u64 = 4096;
/// Bytes of a segment's head.
const SEGMENT_HEAD: u64 = 32;
/// What a new segment is filled with at once.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
/// Room for a frame that is kept for the next one; a longer one gives its room back.
const SPARE_BYTES_MAX: usize = 256 * 1024;
/// So many segments may be in use without a look at what for.
const SEGMENTS_MIN: usize = 4;
/// Less than this part of what is in use is needed: then the oldest segment is given up.
const SPARSE: u64 = 4;

/// What a file is made with.
#[derive(Clone, Copy, Debug)]
struct Form {
    segment: u64,
    salt: u64,
}

impl Form {
    /// Bytes of the stream in one segment.
    fn room(self) -> u64 {
        self.segment - SEGMENT_HEAD
    }

    fn segment_of(self, at: u64) -> u64 {
        at / self.room()
    }

    fn start_of(self, segment: u64) -> u64 {
        segment * self.room()
    }

    /// Where the segment in this slot begins in the file.
    fn slot(self, slot: u64) -> u64 {
        FILE_HEAD + slot * self.segment
    }
}

/// A segment in use.
#[derive(Clone, Copy, Debug)]
struct Segment {
    /// Where it is in the file.
    slot: u64,
    /// The first frame that begins in it, counted from the segment's first byte.
    first: Option<u64>,
}

/// Where an entry is.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The frame's place in the stream.
    frame: u64,
    /// The first byte in the frame.
    at: u32,
    length: u32,
}

#[derive(Debug)]
struct Mark {
    frame: u64,
    bytes: Vec<u8>,
}

/// What the file has of one group.
#[derive(Debug, Default)]
struct Contents {
    entries: BTreeMap<u64, Place>,
    marks: BTreeMap<u8, Mark>,
}

/// Where everything is.
#[derive(Debug, Default)]
struct Map {
    /// Segments in use, by their number in the stream.
    segments: BTreeMap<u64, Segment>,
    /// Slots that may be written over.
    free: Vec<u64>,
    /// Slots that may be once a frame is on disk that does not count on them.
    released: Vec<u64>,
    /// Slots that the file has.
    slots: u64,
    /// Where the next frame will be.
    end: u64,
    groups: BTreeMap<u16, Contents>,
}

impl Map {
    fn apply(&mut self, frame: u64, change: Change) {
        match change {
            Change::Entry { group, index, at, length } => {
                let place = Place { frame, at, length };
                self.groups.entry(group).or_default().entries.insert(index, place);
            }
            Change::Mark { group, which, bytes } => {
                let marks = &mut self.groups.entry(group).or_default().marks;
                marks.insert(which, Mark { frame, bytes });
            }
            Change::Truncate { group, from } => {
                self.groups.entry(group).or_default().entries.split_off(&from);
            }
            Change::Purge { group, upto } => {
                let entries = &mut self.groups.entry(group).or_default().entries;
                *entries = entries.split_off(&upto.saturating_add(1));
            }
            Change::Forget { group } => {
                self.groups.remove(&group);
            }
        }
    }

    /// The first segment that is needed.
    fn oldest(&self, form: Form) -> u64 {
        let first = self.segments.first_key_value().map(|(number, _)| *number);
        first.unwrap_or_else(|| form.segment_of(self.end))
    }

    /// Gives up the segments before the first frame of which something is still true.
    fn release(&mut self, form: Form) {
        let frames = self.groups.values().flat_map(|one| {
            let entries = one.entries.values().map(|place| place.frame);
            entries.chain(one.marks.values().map(|mark| mark.frame))
        });
        let needed = frames.min().unwrap_or(self.end).min(self.end);
        let kept = self.segments.split_off(&form.segment_of(needed));
        let released = std::mem::replace(&mut self.segments, kept);
        self.released.extend(released.values().map(|segment| segment.slot));
    }

    /// What the oldest segment is still needed for, where that is little beside what it holds up.
    fn rest_of_oldest(&self, form: Form) -> Vec<Left> {
        let entries = self.groups.values().flat_map(|one| one.entries.values());
        let needed: u64 = entries.map(|place| u64::from(place.length)).sum();
        let in_use = self.segments.len();
        if in_use <= SEGMENTS_MIN || needed * SPARSE >= in_use as u64 * form.room() {
            return vec![];
        }
        let before = form.start_of(self.oldest(form) + 1);
        let left = self.groups.iter().flat_map(|(group, one)| {
            let entries = one.entries.iter().filter(move |(_, place)| place.frame < before);
            let marks = one.marks.iter().filter(move |(_, mark)| mark.frame < before);
            let entries = entries.map(|(index, _)| Left::Entry(*group, *index));
            entries.chain(marks.map(|(which, _)| Left::Mark(*group, *which)))
        });
        left.collect()
    }
}

/// What has to move before a segment can be given up.
#[derive(Clone, Copy, Debug)]
enum Left {
    Entry(u16, u64),
    Mark(u16, u8),
}

/// The file, for readers.
#[derive(Debug)]
pub struct Wal {
    backend: Box<dyn StorageBackend>,
    form: Form,
    map: RwLock<Map>,
}

/// An open file: who reads it, and the one who writes.
#[derive(Debug)]
pub struct Opened {
    /// For readers.
    pub wal: Arc<Wal>,
    /// For the writer.
    pub pen: Pen,
}

/// Opens a file, or makes one with segments of this size. What was acknowledged is there; what is not as it was
/// written, but for what a cut of the power leaves at the end, is an error.
pub fn open(backend: impl StorageBackend, segment: u64) -> io::Result<Opened> {
    let backend: Box<dyn StorageBackend> = Box::new(backend);
    let form = read_head(&*backend, segment)?;
    let mut wal = Wal { backend, form, map: RwLock::default() };
    recover(&mut wal)?;
    let wal = Arc::new(wal);
    Ok(Opened { pen: Pen { wal: Arc::clone(&wal), left: vec![], spare: vec![] }, wal })
}

impl Wal {
    fn map(&self) -> RwLockReadGuard<'_, Map> {
        self.map.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn map_mut(&self) -> RwLockWriteGuard<'_, Map> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A mark of a group.
    pub fn mark(&self, group: u16, which: u8) -> Option<Vec<u8>> {
        Some(self.map().groups.get(&group)?.marks.get(&which)?.bytes.clone())
    }

    /// The last entry of a group, as it was written.
    pub fn last(&self, group: u16) -> io::Result<Option<(u64, Vec<u8>)>> {
        let map = self.map();
        let last = map.groups.get(&group).and_then(|one| one.entries.last_key_value());
        last.map(|(index, place)| Ok((*index, self.stored(&map, *place)?))).transpose()
    }

    /// The entries of a group from one up to another, without that, as they were written.
    pub fn entries(&self, group: u16, from: u64, until: u64) -> io::Result<Vec<(u64, Vec<u8>)>> {
        let map = self.map();
        let Some(one) = map.groups.get(&group).filter(|_| from < until) else { return Ok(vec![]) };
        let places = one.entries.range(from..until);
        places.map(|(index, place)| Ok((*index, self.stored(&map, *place)?))).collect()
    }

    /// The last entry of a group behind which there are this many bytes of others; `None` if it has less.
    pub fn beyond(&self, group: u16, bytes: u64) -> Option<u64> {
        let map = self.map();
        let (entries, mut behind) = (&map.groups.get(&group)?.entries, 0);
        let mut newest_first = entries.iter().rev();
        let found = newest_first.find(|(_, place)| {
            let is_beyond = behind >= bytes;
            behind += u64::from(place.length);
            is_beyond
        });
        found.map(|(index, _)| *index)
    }

    fn stored(&self, map: &Map, place: Place) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; place.length as usize];
        self.read(&map.segments, place.frame + u64::from(place.at), &mut bytes)?;
        Ok(bytes)
    }

    /// Reads from the stream, over the ends of segments.
    fn read(&self, segments: &BTreeMap<u64, Segment>, at: u64, out: &mut [u8]) -> io::Result<()> {
        self.parts(segments, at, out.len() as u64, |offset, part| {
            self.backend.read(offset, &mut out[part])
        })
    }

    /// The parts of the file that a part of the stream is in.
    fn parts(
        &self,
        segments: &BTreeMap<u64, Segment>,
        at: u64,
        length: u64,
        mut visit: impl FnMut(u64, std::ops::Range<usize>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let place = at + done;
            let number = self.form.segment_of(place);
            let segment = segments.get(&number).ok_or_else(damaged)?;
            let inside = place - self.form.start_of(number);
            let step = (self.form.room() - inside).min(length - done);
            let range = usize::try_from(done).map_err(io::Error::other)?
                ..usize::try_from(done + step).map_err(io::Error::other)?;
            visit(self.form.slot(segment.slot) + SEGMENT_HEAD + inside, range)?;
            done += step;
        }
        Ok(())
    }

    /// The frame at this place and where the next one begins; `None` if there is none, or not all of it.
    fn frame(
        &self,
        segments: &BTreeMap<u64, Segment>,
        at: u64,
    ) -> io::Result<Option<(Head, Vec<u8>)>> {
        let known = |at: u64, length: u64| {
            let last = self.form.segment_of(at + length - 1);
            (self.form.segment_of(at)..=last).all(|number| segments.contains_key(&number))
        };
        let mut bytes = vec![0; frame::HEAD];
        if !known(at, frame::HEAD as u64) {
            return Ok(None);
        }
        self.read(segments, at, &mut bytes)?;
        let Some(head) = Head::read(&bytes, at).filter(|head| known(at, head.bytes() as u64))
        else {
            return Ok(None);
        };
        bytes.resize(head.bytes(), 0);
        self.read(segments, at + frame::HEAD as u64, &mut bytes[frame::HEAD..])?;
        Ok(head.is_of(&bytes, self.form.salt).then_some((head, bytes)))
    }

    /// Reads all frames that are needed, one call after the other: what follows this place, and the bytes that
    /// were read for it. `None` at the end.
    pub fn look_through(&self, at: u64) -> io::Result<Option<(u64, usize)>> {
        let map = self.map();
        let at = match map.segments.iter().find_map(|(number, segment)| {
            segment.first.map(|first| self.form.start_of(*number) + first)
        }) {
            Some(first) => at.max(first),
            None => return Ok(None),
        };
        if at >= map.end {
            return Ok(None);
        }
        let (head, bytes) = self.frame(&map.segments, at)?.ok_or_else(damaged)?;
        Ok(Some((head.next(), bytes.len())))
    }
}

/// The one who writes.
#[derive(Debug)]
pub struct Pen {
    wal: Arc<Wal>,
    left: Vec<Left>,
    /// Room of the frame before.
    spare: Vec<u8>,
}

impl Pen {
    /// A frame to fill.
    pub fn frame(&mut self) -> Frame {
        Frame::within(std::mem::take(&mut self.spare))
    }

    /// Writes a frame and syncs, unless that is not wanted. Readers see it from then on.
    ///
    /// After an error nothing more may be written: what the disk has is not known.
    pub fn write(&mut self, mut frame: Frame, is_synced: bool) -> io::Result<()> {
        self.move_what_is_left(&mut frame)?;
        let form = self.wal.form;
        let (at, oldest) = {
            let map = self.wal.map();
            (map.end, map.oldest(form))
        };
        let bytes = frame.sealed(at, oldest, form.salt);
        let end = at + bytes.len() as u64;
        let is_longer = self.extend(at, end)?;
        {
            let map = self.wal.map();
            self.wal.parts(&map.segments, at, bytes.len() as u64, |offset, part| {
                self.wal.backend.write(offset, &bytes[part])
            })?;
        }
        if is_synced {
            self.wal.backend.sync_data()?;
        }
        let mut map = self.wal.map_mut();
        let released = std::mem::take(&mut map.released);
        map.free.extend(released);
        map.end = end;
        let (bytes, changes) = frame.apart();
        changes.into_iter().for_each(|change| map.apply(at, change));
        if is_longer {
            map.release(form);
            self.left = map.rest_of_oldest(form);
        }
        if bytes.capacity() <= SPARE_BYTES_MAX {
            self.spare = bytes;
        }
        Ok(())
    }

    fn move_what_is_left(&mut self, frame: &mut Frame) -> io::Result<()> {
        if self.left.is_empty() {
            return Ok(());
        }
        // First, so that what the frame itself says of them comes after.
        let own = std::mem::take(frame);
        let map = self.wal.map();
        for left in std::mem::take(&mut self.left) {
            match left {
                Left::Entry(group, index) => {
                    let place = map.groups.get(&group).and_then(|one| one.entries.get(&index));
                    if let Some(place) = place {
                        frame.entry(group, index, &[&self.wal.stored(&map, *place)?]);
                    }
                }
                Left::Mark(group, which) => {
                    let mark = map.groups.get(&group).and_then(|one| one.marks.get(&which));
                    if let Some(mark) = mark {
                        frame.mark(group, which, &mark.bytes);
                    }
                }
            }
        }
        frame.append(own);
        Ok(())
    }

    /// Has segments for this part of the stream; whether it needed more.
    fn extend(&self, at: u64, end: u64) -> io::Result<bool> {
        let form = self.wal.form;
        let mut map = self.wal.map_mut();
        let missing: Vec<u64> = (form.segment_of(at)..=form.segment_of(end - 1))
            .filter(|number| !map.segments.contains_key(number))
            .collect();
        for number in &missing {
            let start = form.start_of(*number);
            let first = if start == at { Some(0) } else { end.checked_sub(start) };
            let first = first.filter(|first| *first < form.room());
            let slot = match map.free.pop() {
                Some(slot) => slot,
                None => self.grow(&mut map)?,
            };
            self.wal
                .backend
                .write(form.slot(slot), &recover::segment_head(*number, first, form.salt))?;
            map.segments.insert(*number, Segment { slot, first });
        }
        Ok(!missing.is_empty())
    }

    /// A new slot at the end of the file, written once: a sync of what is there already needs no word with the
    /// file system.
    fn grow(&self, map: &mut Map) -> io::Result<u64> {
        let (form, slot) = (self.wal.form, map.slots);
        self.wal.backend.set_len(form.slot(slot + 1))?;
        let mut done = 0;
        while done < form.segment {
            let part = (ZEROS.len() as u64).min(form.segment - done);
            let part = usize::try_from(part).map_err(io::Error::other)?;
            self.wal.backend.write(form.slot(slot) + done, &ZEROS[..part])?;
            done += part as u64;
        }
        map.slots += 1;
        Ok(slot)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard};

    use super::*;

    const SEGMENT: u64 = 1024;

    /// A disk in memory; clones share it.
    #[derive(Clone, Debug, Default)]
    struct Memory(Arc<Mutex<Vec<u8>>>);

    impl Memory {
        fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        fn holding(bytes: Vec<u8>) -> Self {
            Self(Arc::new(Mutex::new(bytes)))
        }
    }

    fn place(offset: u64) -> usize {
        usize::try_from(offset).expect("small")
    }

    impl StorageBackend for Memory {
        fn len(&self) -> io::Result<u64> {
            Ok(self.bytes().len() as u64)
        }

        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            let bytes = self.bytes();
            let part = bytes.get(place(offset)..place(offset) + out.len());
            out.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }

        fn set_len(&self, length: u64) -> io::Result<()> {
            self.bytes().resize(place(length), 0);
            Ok(())
        }

        fn sync_data(&self) -> io::Result<()> {
            Ok(())
        }

        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            self.bytes()[place(offset)..place(offset) + data.len()].copy_from_slice(data);
            Ok(())
        }
    }

    fn text(group: u16, index: u64) -> Vec<u8> {
        format!("entry {index} of {group} ").repeat(usize::from(group)).into_bytes()
    }

    #[test]
    fn what_lies_beyond_so_many_bytes_is_told() {
        let Opened { wal, mut pen } = open(Memory::default(), SEGMENT).expect("opens");
        assert_eq!(wal.beyond(1, 0), None, "an empty log has nothing");
        for index in 1..=5 {
            let mut frame = Frame::default();
            frame.entry(1, index, &[&[0; 100]]);
            frame.entry(2, index, &[&[0; 900]]);
            pen.write(frame, true).expect("written");
        }
        for (bytes, last) in [
            (0, Some(5)),
            (1, Some(4)),
            (100, Some(4)),
            (101, Some(3)),
            (400, Some(1)),
            (401, None),
        ] {
            assert_eq!(wal.beyond(1, bytes), last, "{bytes}");
        }
    }

    fn appended(pen: &mut Pen, group: u16, index: u64) {
        let mut frame = Frame::default();
        frame.entry(group, index, &[&text(group, index)]);
        pen.write(frame, true).expect("written");
    }

    fn purged(pen: &mut Pen, group: u16, upto: u64) {
        let mut frame = Frame::default();
        frame.mark(group, 3, &upto.to_le_bytes());
        frame.purge(group, upto);
        pen.write(frame, true).expect("written");
    }

    fn holds(wal: &Wal, group: u16, from: u64, upto: u64) {
        let found = wal.entries(group, 0, u64::MAX).expect("readable");
        let wanted: Vec<_> = (from..=upto).map(|index| (index, text(group, index))).collect();
        assert!(found == wanted, "group {group} has {:?}", found.iter().map(|one| one.0));
    }

    #[test]
    fn a_group_that_rests_does_not_hold_the_others_segments() {
        let disk = Memory::default();
        let Opened { wal, mut pen } = open(disk.clone(), SEGMENT).expect("made");
        (1..=3).for_each(|index| appended(&mut pen, 7, index));
        let mut frame = Frame::default();
        frame.mark(7, 1, b"vote");
        pen.write(frame, true).expect("written");
        for index in 1..=2000 {
            appended(&mut pen, 5, index);
            if index > 10 {
                purged(&mut pen, 5, index - 10);
            }
        }
        let length = disk.bytes().len();
        assert!(length < 16 * 1024, "{length} bytes for some two kilobytes");
        let check = |wal: &Wal| {
            holds(wal, 7, 1, 3);
            holds(wal, 5, 1991, 2000);
            assert_eq!(wal.mark(7, 1).as_deref(), Some(&b"vote"[..]));
            assert_eq!(wal.mark(5, 3).as_deref(), Some(&1990_u64.to_le_bytes()[..]));
        };
        check(&wal);
        check(&open(disk, SEGMENT).expect("whole").wal);
    }

    #[test]
    fn frames_may_be_longer_than_segments() {
        let disk = Memory::default();
        let mut pen = open(disk.clone(), SEGMENT).expect("made").pen;
        for index in 1..=20 {
            appended(&mut pen, 300, index);
            appended(&mut pen, 2, index);
        }
        let Opened { wal, mut pen } = open(disk.clone(), 4 * SEGMENT).expect("whole");
        holds(&wal, 300, 1, 20);
        purged(&mut pen, 300, 19);
        purged(&mut pen, 2, 20);
        (21..40).for_each(|index| appended(&mut pen, 2, index));
        let wal = open(disk, SEGMENT).expect("whole").wal;
        holds(&wal, 300, 20, 20);
        holds(&wal, 2, 21, 39);
    }

    #[test]
    fn any_flipped_bit_is_found_but_in_the_last_frame() {
        let disk = Memory::default();
        let mut pen = open(disk.clone(), SEGMENT).expect("made").pen;
        (1..=60).for_each(|index| appended(&mut pen, 5, index));
        purged(&mut pen, 5, 30);
        (61..=80).for_each(|index| appended(&mut pen, 5, index));
        pen.write(Frame::default(), true).expect("written");
        let bytes = disk.bytes().clone();
        let (mut noticed, mut used) = (0, 0);
        for bit in (0..bytes.len() * 8).filter(|bit| bytes[bit / 8] != 0) {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            used += 1;
            match open(Memory::holding(other), SEGMENT) {
                Ok(opened) => holds(&opened.wal, 5, 31, 80),
                Err(_) => noticed += 1,
            }
        }
        assert!(noticed * 2 > used, "{noticed} of {used}");
    }

    #[test]
    fn all_that_is_needed_is_looked_through() {
        let disk = Memory::default();
        let Opened { wal, mut pen } = open(disk.clone(), SEGMENT).expect("made");
        (1..=60).for_each(|index| appended(&mut pen, 5, index));
        let look = || {
            let (mut at, mut frames) = (0, 0);
            while let Some((next, _)) = wal.look_through(at)? {
                (at, frames) = (next, frames + 1);
            }
            io::Result::Ok(frames)
        };
        assert_eq!(look().expect("whole"), 60);
        let offset =
            disk.bytes().windows(10).position(|part| part == b"entry 9 of").expect("there");
        disk.bytes()[offset] ^= 4;
        assert!(look().is_err());
    }
}
