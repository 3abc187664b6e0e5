//! A snapshot on its way between nodes: a head, then every row, then the checksum of all of it. Its rows
//! go on as they come, so a large state needs little memory.

use std::{
    fs,
    future::Future,
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures::{Stream, StreamExt as _, stream};
use tokio::sync::mpsc;

use super::{disk::Scribe, pace::Pace, state::StateSnapshot};

/// Bytes of a snapshot that are sent in a second: a new replica comes soon enough, and those that serve
/// go on serving meanwhile.
const BYTES_PER_SECOND: u64 = 50 * 1024 * 1024;

/// Bytes that are sent in one piece.
const PIECE_BYTES: usize = 256 * 1024;
/// Pieces that wait for a slow peer.
const PIECES_WAITING: usize = 4;
/// Bytes that tell a length.
const LENGTH_BYTES: usize = 4;
/// Longest head.
const HEAD_BYTES_MAX: usize = 1024 * 1024;
/// Longest key or row that is believed.
const ROW_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Marks the end of the rows; no table has this number.
const END: u8 = u8::MAX;

/// Rows that a peer sent, in a file that goes with this value.
pub struct ReceivedRows {
    path: PathBuf,
    bytes: u64,
}

impl Drop for ReceivedRows {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// A snapshot's bytes.
pub fn stream(
    snapshot: StateSnapshot,
    head: Bytes,
    scribe: &Scribe,
) -> impl Stream<Item = io::Result<Bytes>> + use<> {
    if let Scribe::Task(_) = scribe {
        let mut pieces = vec![];
        let written = write(&snapshot, &head, |piece| {
            pieces.push(Ok(piece));
            Ok(())
        });
        return stream::iter(pieces.into_iter().chain(written.err().map(Err))).left_stream();
    }
    let (sender, mut receiver) = mpsc::channel(PIECES_WAITING);
    tokio::task::spawn_blocking(move || {
        let gone = || io::Error::other("the peer is gone");
        let mut pace = Pace::of(BYTES_PER_SECOND);
        let sent = write(&snapshot, &head, |piece| {
            pace.after(piece.len());
            sender.blocking_send(Ok(piece)).map_err(|_| gone())
        });
        if let Err(error) = sent {
            let _ = sender.blocking_send(Err(error));
        }
    });
    stream::poll_fn(move |cx| receiver.poll_recv(cx)).right_stream()
}

/// Writes a snapshot's bytes, piece by piece.
pub fn write(
    snapshot: &StateSnapshot,
    head: &Bytes,
    mut put: impl FnMut(Bytes) -> io::Result<()>,
) -> io::Result<()> {
    let mut piece = BytesMut::with_capacity(PIECE_BYTES * 2);
    let mut sum = 0;
    piece.put_u32(u32::try_from(head.len()).map_err(io::Error::other)?);
    piece.extend_from_slice(head);
    let mut flush = |piece: &mut BytesMut| {
        let bytes = piece.split().freeze();
        sum = crc32c::crc32c_append(sum, &bytes);
        put(bytes).map(|()| sum)
    };
    flush(&mut piece)?;
    let written = snapshot.rows(|table, key, row| {
        piece.put_u8(table);
        piece.put_u32(u32::try_from(key.len()).unwrap_or(u32::MAX));
        piece.put_u32(u32::try_from(row.len()).unwrap_or(u32::MAX));
        piece.extend_from_slice(key);
        piece.extend_from_slice(row);
        if piece.len() >= PIECE_BYTES {
            flush(&mut piece)?;
        }
        Ok(())
    });
    written.map_err(io::Error::other)?;
    piece.put_u8(END);
    let sum = flush(&mut piece)?;
    put(Bytes::copy_from_slice(&sum.to_be_bytes()))
}

/// Where the rows of a snapshot go as they come.
pub(super) trait Rows: Send {
    /// The next bytes of them; rows may begin and end anywhere in these.
    fn put(&mut self, part: Bytes) -> impl Future<Output = io::Result<()>> + Send;
}

struct ToFile<'s> {
    rows: ReceivedRows,
    file: Arc<fs::File>,
    scribe: &'s Scribe,
}

impl Rows for ToFile<'_> {
    async fn put(&mut self, part: Bytes) -> io::Result<()> {
        self.rows.bytes += part.len() as u64;
        let file = Arc::clone(&self.file);
        self.scribe.aside(move || (&*file).write_all(&part)).await
    }
}

/// Takes a peer's snapshot: its head, and its rows in a file of `folder`.
pub async fn receive(
    folder: &Path,
    bytes: impl Stream<Item = io::Result<Bytes>> + Unpin + Send,
    scribe: &Scribe,
) -> io::Result<(Bytes, ReceivedRows)> {
    fs::create_dir_all(folder)?;
    let path = folder.join(format!("{:016x}", rand::random::<u64>()));
    let rows = ReceivedRows { path: path.clone(), bytes: 0 };
    let file = scribe.aside(move || fs::File::create(path)).await?;
    let mut to = ToFile { rows, file: Arc::new(file), scribe };
    let head = take(bytes, &mut to).await?;
    Ok((head, to.rows))
}

/// Takes a peer's snapshot: gives its head, and hands its rows on. What was handed on is worth nothing unless this
/// ends well.
pub(super) async fn take(
    mut bytes: impl Stream<Item = io::Result<Bytes>> + Unpin + Send,
    to: &mut impl Rows,
) -> io::Result<Bytes> {
    let mut start = BytesMut::new();
    let head = loop {
        if let Some(head) = head(&mut start)? {
            break head;
        }
        start.extend_from_slice(&bytes.next().await.ok_or(io::ErrorKind::UnexpectedEof)??);
    };
    let mut sum = crc32c::crc32c(&u32::try_from(head.len()).unwrap_or(u32::MAX).to_be_bytes());
    sum = crc32c::crc32c_append(sum, &head);
    // The last four bytes are the sum itself; until more follows, they may be the last.
    let mut held = start;
    loop {
        let is_end = gather(&mut held, &mut bytes).await?;
        let part = held.split_to(held.len().saturating_sub(4)).freeze();
        sum = crc32c::crc32c_append(sum, &part);
        to.put(part).await?;
        if is_end {
            break;
        }
    }
    if held.as_ref() != sum.to_be_bytes() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the snapshot is damaged"));
    }
    Ok(head)
}

/// Waits for a piece that is worth a write; says whether it is the last one.
async fn gather(
    held: &mut BytesMut,
    bytes: &mut (impl Stream<Item = io::Result<Bytes>> + Unpin),
) -> io::Result<bool> {
    while held.len() < PIECE_BYTES {
        match bytes.next().await {
            Some(more) => held.extend_from_slice(&more?),
            None => return Ok(true),
        }
    }
    Ok(false)
}

fn head(start: &mut BytesMut) -> io::Result<Option<Bytes>> {
    let Some(length) = start.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_be_bytes(*length) as usize;
    if length > HEAD_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    if start.len() < 4 + length {
        return Ok(None);
    }
    let _ = start.split_to(4);
    Ok(Some(start.split_to(length).freeze()))
}

/// Cuts bytes that come in pieces into rows.
#[derive(Default)]
pub(super) struct Cutter {
    held: BytesMut,
    is_ended: bool,
}

impl Cutter {
    /// These are next.
    pub(super) fn add(&mut self, part: &[u8]) {
        self.held.extend_from_slice(part);
    }

    /// The next row as `(table, key, row)`, once it is here whole.
    pub(super) fn row(&mut self) -> io::Result<Option<(u8, Bytes, Bytes)>> {
        let damaged = || Err(io::ErrorKind::InvalidData.into());
        if self.is_ended {
            return if self.held.is_empty() { Ok(None) } else { damaged() };
        }
        let mut left = &self.held[..];
        let Some(table) = left.first().copied() else { return Ok(None) };
        if table == END {
            self.held.advance(1);
            self.is_ended = true;
            return self.row();
        }
        left = &left[1..];
        if left.len() < 2 * LENGTH_BYTES {
            return Ok(None);
        }
        let (key, row) = (read_length(&mut left)?, read_length(&mut left)?);
        if left.len() < key + row {
            return Ok(None);
        }
        self.held.advance(1 + 2 * LENGTH_BYTES);
        let (key, row) = (self.held.split_to(key), self.held.split_to(row));
        Ok(Some((table, key.freeze(), row.freeze())))
    }

    /// Whether the mark of the end was there, and nothing after it.
    pub(super) fn is_ended(&self) -> bool {
        self.is_ended && self.held.is_empty()
    }
}

impl ReceivedRows {
    /// How many bytes its rows have.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Visits all rows as `(table, key, row)`.
    pub fn rows(
        &self,
        mut visit: impl FnMut(u8, &[u8], &[u8]) -> Result<(), redb::Error>,
    ) -> Result<(), redb::Error> {
        let mut file = fs::File::open(&self.path)?;
        let (mut cutter, mut piece) = (Cutter::default(), vec![0; PIECE_BYTES]);
        while !cutter.is_ended() {
            let length = file.read(&mut piece)?;
            if length == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            cutter.add(&piece[..length]);
            while let Some((table, key, row)) = cutter.row()? {
                visit(table, &key, &row)?;
            }
        }
        Ok(())
    }
}

fn read_length(file: &mut impl io::Read) -> io::Result<usize> {
    let mut bytes = [0; LENGTH_BYTES];
    file.read_exact(&mut bytes)?;
    let length = u32::from_be_bytes(bytes) as usize;
    if length > ROW_BYTES_MAX { Err(io::ErrorKind::InvalidData.into()) } else { Ok(length) }
}
