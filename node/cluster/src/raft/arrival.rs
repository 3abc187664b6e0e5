//! A snapshot that a peer sends arrives in a table beside the rows that it is to replace, a few MiB at a
//! time: the others who write to the file wait for none of it long, and to install it takes one short
//! transaction.

use std::{io, mem, sync::Arc};

use bytes::Bytes;
use futures::Stream;

use super::{
    checked,
    received::{self, Cutter, Rows},
    state::{Arrived, StateFile, row_key},
};

/// Bytes of rows that are written in one transaction: few enough that whoever waits for the disk meanwhile, for
/// another file or another node, waits for some milliseconds.
const BATCH_BYTES: usize = 1024 * 1024;

/// Takes a peer's snapshot of a group: its head, and its rows.
pub(super) async fn take(
    file: &Arc<StateFile>,
    group: u16,
    bytes: impl Stream<Item = io::Result<Bytes>> + Unpin + Send,
) -> io::Result<(Bytes, Arc<Arrived>)> {
    let mut to = ToTable {
        table: Arc::new(file.arriving(group)),
        cutter: Cutter::default(),
        rows: vec![],
        bytes: 0,
    };
    let head = received::take(bytes, &mut to).await?;
    Ok((head, to.finish().await?))
}

struct ToTable {
    table: Arc<Arrived>,
    cutter: Cutter,
    rows: Vec<(Vec<u8>, Vec<u8>)>,
    bytes: usize,
}

impl Rows for ToTable {
    async fn put(&mut self, part: Bytes) -> io::Result<()> {
        let group = self.table.group();
        self.cutter.add(&part);
        while let Some((table, key, row)) = self.cutter.row()? {
            let key = row_key(group, table, &key);
            let row = checked::write(&key, &row);
            self.bytes += key.len() + row.len();
            self.rows.push((key, row));
        }
        if self.bytes >= BATCH_BYTES {
            self.write().await?;
        }
        Ok(())
    }
}

impl ToTable {
    async fn write(&mut self) -> io::Result<()> {
        self.bytes = 0;
        let (rows, table) = (mem::take(&mut self.rows), Arc::clone(&self.table));
        self.table.scribe().aside(move || table.add(&rows)).await
    }

    async fn finish(mut self) -> io::Result<Arc<Arrived>> {
        if !self.cutter.is_ended() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // Also where there is none: the table must be there.
        self.write().await?;
        Ok(self.table)
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;
    use crate::raft::{
        disk::{self, Scribe},
        state::{Applied, StateSnapshot},
    };

    const GROUP: u16 = 3;

    type Found = Vec<(u8, Vec<u8>, Vec<u8>)>;

    /// A file whose work is done where it is asked for.
    fn file(folder: &tempfile::TempDir, name: &str) -> Arc<StateFile> {
        let database = disk::open(&folder.path().join(name)).expect("opens");
        let scribe = Scribe::Task(Arc::new(|| std::time::Duration::ZERO));
        StateFile::start_with(database, scribe).expect("starts")
    }

    fn install(file: &Arc<StateFile>, arrived: Arc<Arrived>) {
        let arrived = StateSnapshot::arrived(arrived);
        file.install(GROUP, &Applied::default(), &arrived, || Ok(())).expect("it is put in place");
    }

    /// Puts rows of two tables there, of all lengths up to some.
    fn fill(file: &Arc<StateFile>, longest: usize, seed: u8) {
        let arriving = Arc::new(file.arriving(GROUP));
        let lengths = (0..longest).step_by(13);
        let rows = lengths.enumerate().map(|(number, length)| {
            let key = row_key(GROUP, 1 + u8::from(number > 20), &number.to_be_bytes());
            let row = checked::write(&key, &vec![seed; length]);
            (key, row)
        });
        arriving.add(&rows.collect::<Vec<_>>()).expect("they are written");
        install(file, arriving);
    }

    /// A file whose rows are sent, and one with older rows that they are to replace.
    fn filled(new: usize, old: usize) -> (tempfile::TempDir, Arc<StateFile>, Arc<StateFile>) {
        let folder = tempfile::tempdir().expect("a folder");
        let (from, to) = (file(&folder, "from"), file(&folder, "to"));
        fill(&from, new, b'n');
        fill(&to, old, b'o');
        (folder, from, to)
    }

    fn rows(file: &Arc<StateFile>) -> Found {
        let mut found = vec![];
        let snapshot = file.snapshot(GROUP).expect("reads");
        let visited = snapshot.rows(|table, key, row| {
            found.push((table, key.to_vec(), row.to_vec()));
            Ok(())
        });
        visited.map(|()| found).expect("reads")
    }

    fn sent(file: &Arc<StateFile>) -> Vec<u8> {
        let mut bytes = vec![];
        let snapshot = file.snapshot(GROUP).expect("reads");
        let written = received::write(&snapshot, &Bytes::from_static(b"head"), |piece| {
            bytes.extend_from_slice(&piece);
            Ok(())
        });
        written.map(|()| bytes).expect("writes")
    }

    async fn arrive(
        to: &Arc<StateFile>,
        bytes: &[u8],
        piece: usize,
    ) -> io::Result<(Bytes, Arc<Arrived>)> {
        let pieces: Vec<_> =
            bytes.chunks(piece).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
        take(to, GROUP, stream::iter(pieces)).await
    }

    #[tokio::test]
    async fn rows_take_the_place_of_those_before_at_once_and_not_earlier() {
        let (_folder, from, to) = filled(3000, 500);
        let (before, bytes) = (rows(&to), sent(&from));
        for piece in [1, 7, 4096, bytes.len()] {
            let (head, arrived) = arrive(&to, &bytes, piece).await.expect("it arrives");
            assert_eq!(&head[..], b"head");
            assert_eq!(rows(&to), before, "nothing is seen of it yet");
            install(&to, arrived);
            assert_eq!(rows(&to), rows(&from), "in pieces of {piece} bytes");
            assert_eq!(to.table_names(), ["applied", "rows-3"]);
            fill(&to, 500, b'o');
        }
    }

    #[tokio::test]
    async fn what_is_damaged_or_cut_off_leaves_nothing() {
        let (_folder, from, to) = filled(500, 100);
        let (before, bytes) = (rows(&to), sent(&from));
        for place in (0..bytes.len()).step_by(31).chain([bytes.len() - 1]) {
            let mut flipped = bytes.clone();
            flipped[place] ^= 0b100;
            assert!(arrive(&to, &flipped, 100).await.is_err(), "a flipped bit of byte {place}");
            assert!(arrive(&to, &bytes[..place], 100).await.is_err(), "{place} bytes of it");
        }
        let longer = [&bytes[..], b"x"].concat();
        assert!(arrive(&to, &longer, 100).await.is_err(), "and one byte more");
        assert_eq!(
            (rows(&to), to.table_names()),
            (before, vec!["applied".into(), "rows-3".into()])
        );
    }
}
