//! Finds out what a file holds when it is opened.

use std::{collections::BTreeMap, io};

use redb::StorageBackend;

use super::{
    FILE_HEAD, Form, Map, SEGMENT_HEAD, Segment, Wal, damaged,
    frame::{self, Head},
};

const MAGIC: u64 = 0x314C_4157_5453_4F52;
const SEGMENT_MAGIC: u32 = 0x4745_5352;
/// Where no frame begins in a segment.
const NOWHERE: u32 = u32::MAX;

/// Reads what the file was made with, or makes it: with that synced, before anything else is written.
pub(super) fn read_head(backend: &dyn StorageBackend, segment: u64) -> io::Result<Form> {
    let length = backend.len()?;
    let mut head = [0; 32];
    if length >= FILE_HEAD {
        backend.read(0, &mut head)?;
        if let Some(form) = form_of(&head) {
            return Ok(form);
        }
        // Nothing was stored before the head was synced.
        if length > FILE_HEAD {
            return Err(damaged());
        }
    }
    let form = Form { segment, salt: rand::random() };
    backend.set_len(FILE_HEAD)?;
    backend.write(0, &head_of(form))?;
    backend.sync_data()?;
    Ok(form)
}

fn head_of(form: Form) -> [u8; 32] {
    let mut head = [0; 32];
    head[..8].copy_from_slice(&MAGIC.to_le_bytes());
    head[8..16].copy_from_slice(&form.segment.to_le_bytes());
    head[16..24].copy_from_slice(&form.salt.to_le_bytes());
    let sum = crc32c::crc32c(&head[..24]);
    head[24..28].copy_from_slice(&sum.to_le_bytes());
    head
}

fn form_of(head: &[u8; 32]) -> Option<Form> {
    let form = Form { segment: word(head, 8), salt: word(head, 16) };
    (head_of(form) == *head).then_some(form)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// What stands before a segment's bytes.
pub(super) fn segment_head(
    number: u64,
    first: Option<u64>,
    salt: u64,
) -> [u8; SEGMENT_HEAD as usize] {
    let mut head = [0; SEGMENT_HEAD as usize];
    let first = first.and_then(|first| u32::try_from(first).ok()).unwrap_or(NOWHERE);
    head[..4].copy_from_slice(&SEGMENT_MAGIC.to_le_bytes());
    head[8..16].copy_from_slice(&number.to_le_bytes());
    head[16..20].copy_from_slice(&first.to_le_bytes());
    let sum = crc32c::crc32c_append(crc32c::crc32c(&salt.to_le_bytes()), &head[8..]);
    head[4..8].copy_from_slice(&sum.to_le_bytes());
    head
}

/// What a slot has at its beginning.
enum Start {
    /// Nothing yet.
    Empty,
    /// A segment.
    Segment(u64, Segment),
    /// Neither.
    Odd,
}

fn start_of(wal: &Wal, slot: u64) -> io::Result<Start> {
    let mut head = [0; SEGMENT_HEAD as usize];
    wal.backend.read(wal.form.slot(slot), &mut head)?;
    if head.iter().all(|byte| *byte == 0) {
        return Ok(Start::Empty);
    }
    let number = word(&head, 8);
    let first = u32::from_le_bytes([head[16], head[17], head[18], head[19]]);
    let first = (first != NOWHERE).then(|| u64::from(first));
    Ok(match segment_head(number, first, wal.form.salt) == head {
        true => Start::Segment(number, Segment { slot, first }),
        false => Start::Odd,
    })
}

/// Fills the map of a file that was just opened.
pub(super) fn recover(wal: &mut Wal) -> io::Result<()> {
    let slots = wal.backend.len()?.saturating_sub(FILE_HEAD) / wal.form.segment;
    let (mut segments, mut odd, mut free) = (BTreeMap::new(), vec![], vec![]);
    for slot in 0..slots {
        match start_of(wal, slot)? {
            Start::Empty => free.push(slot),
            Start::Odd => odd.push(slot),
            Start::Segment(number, segment) => {
                if segments.insert(number, segment).is_some() {
                    return Err(damaged());
                }
            }
        }
    }
    let mut map = Map { slots, free, ..Map::default() };
    // A frame that a cut of the power tore may have left the heads of later segments, with holes between them:
    // the newest row of segments in which a frame is whole is the stream.
    let mut orphans = vec![];
    while let Some(row) = last_row(&mut segments) {
        match replay(wal, &row, &mut map)? {
            true => {
                map.segments = row;
                break;
            }
            false => orphans.extend(row.into_values().map(|segment| segment.slot)),
        }
    }
    // Older ones were given up, and no slot of theirs was needed since.
    map.free.extend(segments.values().map(|segment| segment.slot));
    let after = map.segments.split_off(&map.end.div_ceil(wal.form.room()));
    orphans.extend(after.into_values().map(|segment| segment.slot));
    let last = map.segments.values().next_back().map(|segment| segment.slot);
    for slot in orphans.iter().chain(&odd).chain(last.as_ref()) {
        if has_frame_after(wal, *slot, map.end)? {
            return Err(damaged());
        }
    }
    for slot in orphans.into_iter().chain(odd) {
        wal.backend.write(wal.form.slot(slot), &[0; SEGMENT_HEAD as usize])?;
        map.free.push(slot);
    }
    // What is whole may have been on its way to the disk when the process ended.
    wal.backend.sync_data()?;
    map.release(wal.form);
    *wal.map.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner) = map;
    Ok(())
}

/// Takes the segments with the highest numbers that follow each other.
fn last_row(segments: &mut BTreeMap<u64, Segment>) -> Option<BTreeMap<u64, Segment>> {
    let (mut first, _) = segments.last_key_value()?;
    while let Some(before) = first.checked_sub(1)
        && let Some((number, _)) = segments.get_key_value(&before)
    {
        first = number;
    }
    let first = *first;
    Some(segments.split_off(&first))
}

/// Carries out what the frames in these segments say; whether there is one.
fn replay(wal: &Wal, row: &BTreeMap<u64, Segment>, map: &mut Map) -> io::Result<bool> {
    let Some((oldest, end)) = last_frame(wal, row)? else { return Ok(false) };
    if !row.contains_key(&oldest) {
        return Err(damaged());
    }
    let mut starts = row.range(oldest..).filter_map(|segment| first_in(wal, segment));
    let mut at = starts.next().ok_or_else(damaged)?;
    while at < end {
        let (head, bytes) = wal.frame(row, at)?.ok_or_else(damaged)?;
        for change in frame::changes(&bytes)? {
            map.apply(at, change);
        }
        at = head.next();
    }
    map.end = end;
    Ok(true)
}

fn first_in(wal: &Wal, (number, segment): (&u64, &Segment)) -> Option<u64> {
    segment.first.map(|first| wal.form.start_of(*number) + first)
}

/// The first segment that was needed when the last whole frame was written, and where that frame ends. Segments
/// before that one may have been written over in part, so what they say is not asked for.
fn last_frame(wal: &Wal, row: &BTreeMap<u64, Segment>) -> io::Result<Option<(u64, u64)>> {
    for mut at in row.iter().rev().filter_map(|segment| first_in(wal, segment)) {
        let mut last = None;
        while let Some((head, _)) = wal.frame(row, at)? {
            at = head.next();
            last = Some((head.oldest, at));
        }
        if last.is_some() {
            return Ok(last);
        }
    }
    Ok(None)
}

/// Whether a slot has a frame that lies beyond this place in the stream.
fn has_frame_after(wal: &Wal, slot: u64, end: u64) -> io::Result<bool> {
    let mut bytes = vec![0; usize::try_from(wal.form.room()).map_err(io::Error::other)?];
    wal.backend.read(wal.form.slot(slot) + SEGMENT_HEAD, &mut bytes)?;
    Ok(frame::places(bytes.len()).any(|place| {
        let rest = &bytes[place..];
        let Some(at) = frame::place_of(rest) else { return false };
        let is_here = at % wal.form.room() == place as u64;
        let head = Head::read(rest, at).filter(|_| is_here && at >= end);
        let whole = head.and_then(|head| Some((head, rest.get(..head.bytes())?)));
        whole.is_some_and(|(head, whole)| head.is_of(whole, wal.form.salt))
    }))
}
