//! Ordered maps that remember which rows changed, so that a writer can carry them to disk later.
//!
//! A *history* table gives up its rows once they are written and reads them back through its
//! [`Backing`]: memory is bounded by live work, not by what ever happened. Eviction never changes
//! an answer: a row leaves memory only after it is durable, and a removed row stays as a mark until
//! its removal is durable.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::{Bound, ControlFlow},
    sync::Arc,
};

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    Timestamp,
    codec::{self, DecodeError},
};

/// A key whose bytes sort as the key does.
pub trait Key: Ord + Clone + fmt::Debug + Send + Sync + 'static {
    /// The key as bytes that sort like the key.
    fn encode(&self) -> Vec<u8>;
    /// Reads what [`Key::encode`] wrote.
    fn decode(bytes: &[u8]) -> Option<Self>;
}

impl Key for u64 {
    fn encode(&self) -> Vec<u8> {
        self.to_be_bytes().to_vec()
    }
    fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self::from_be_bytes(bytes.try_into().ok()?))
    }
}

impl Key for String {
    fn encode(&self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }
    fn decode(bytes: &[u8]) -> Option<Self> {
        Self::from_utf8(bytes.to_vec()).ok()
    }
}

impl Key for [u8; 32] {
    fn encode(&self) -> Vec<u8> {
        self.to_vec()
    }
    fn decode(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok()
    }
}

/// A pair sorts by its first part; that part must have a fixed width in bytes.
impl<K: Key> Key for (u128, K) {
    fn encode(&self) -> Vec<u8> {
        [self.0.to_be_bytes().as_slice(), &self.1.encode()].concat()
    }
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (first, rest) = bytes.split_first_chunk::<16>()?;
        Some((u128::from_be_bytes(*first), K::decode(rest)?))
    }
}

/// Anything that can be stored in a table.
pub trait Row: Serialize + DeserializeOwned + Clone + fmt::Debug + Send + Sync + 'static {}
impl<T: Serialize + DeserializeOwned + Clone + fmt::Debug + Send + Sync + 'static> Row for T {}

/// A row on its way to disk: encoded by the writer, outside of any lock.
pub trait Encode: Send + Sync {
    /// The row's bytes.
    fn bytes(&self) -> Vec<u8>;
}

impl<T: Row> Encode for T {
    fn bytes(&self) -> Vec<u8> {
        codec::encode(self)
    }
}

/// A key and its row, as bytes.
pub type RawRow = (Vec<u8>, Vec<u8>);

/// Where written rows of a history table can be read again. Reading has no effect and gives every
/// replica the same answer.
pub trait Backing: Send + Sync {
    /// The row of `key`.
    fn get(&self, table: u8, key: &[u8]) -> Option<Vec<u8>>;
    /// At most `limit` rows beyond `from` (exclusive; `None` begins at the end), in this direction.
    fn scan(&self, table: u8, from: Option<&[u8]>, order: Order, limit: usize) -> Vec<RawRow>;
}

/// The direction of a walk over keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Smallest key first.
    Ascending,
    /// Greatest key first.
    Descending,
}

impl Order {
    /// The direction of a list that shows the oldest first, or the newest.
    pub fn ascending(is_ascending: bool) -> Self {
        if is_ascending { Self::Ascending } else { Self::Descending }
    }
}

/// One changed row: `row` is `None` where it was removed.
pub struct Change {
    /// The table's number.
    pub table: u8,
    /// The encoded key.
    pub key: Vec<u8>,
    /// The row as it is now.
    pub row: Option<Arc<dyn Encode>>,
}

/// What a writer needs of a table, whatever its types.
pub trait AnyTable {
    /// The table's number, stable for ever.
    fn number(&self) -> u8;
    /// Moves the changes since the last call into `out`.
    fn take_changes(&mut self, out: &mut Vec<Change>);
    /// The changes taken last are durable.
    fn written(&mut self);
    /// Whether rows stay on disk until they are asked for.
    fn is_history(&self) -> bool;
    /// Puts back a row that was read from disk.
    fn load(&mut self, key: &[u8], row: &[u8]) -> Result<(), DecodeError>;
    /// Forgets everything in memory, as before a snapshot is installed.
    fn clear(&mut self);
    /// Names the place where written rows are read again.
    fn set_backing(&mut self, backing: Arc<dyn Backing>);
    /// The number of changes waiting to be taken.
    fn pending(&self) -> usize;
}

/// An ordered map of rows. See the module's text.
pub struct Table<K, V> {
    number: u8,
    history: bool,
    rows: BTreeMap<K, Option<Arc<V>>>,
    /// How many of these are rows and not marks of removed ones.
    count: usize,
    /// Changed rows, each with whether nothing of it ever went to disk: such a row can go without a trace.
    dirty: BTreeMap<K, bool>,
    in_flight: Vec<K>,
    backing: Option<Arc<dyn Backing>>,
}

impl<K: Key, V: Row> Table<K, V> {
    /// A table whose rows all stay in memory.
    pub fn live(number: u8) -> Self {
        Self {
            number,
            history: false,
            rows: BTreeMap::new(),
            count: 0,
            dirty: BTreeMap::new(),
            in_flight: Vec::new(),
            backing: None,
        }
    }

    /// A table whose written rows leave memory.
    pub fn history(number: u8) -> Self {
        Self { history: true, ..Self::live(number) }
    }

    /// The row of `key`.
    pub fn get(&self, key: &K) -> Option<Arc<V>> {
        match self.rows.get(key) {
            Some(row) => row.clone(),
            None if self.history => self.read_back(key),
            None => None,
        }
    }

    fn read_back(&self, key: &K) -> Option<Arc<V>> {
        let bytes = self.backing.as_ref()?.get(self.number, &key.encode())?;
        Some(Arc::new(readable(&bytes)))
    }

    /// Whether `key` has a row.
    pub fn contains(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    /// Writes a row, new or over an old one.
    pub fn put(&mut self, key: K, row: impl Into<Arc<V>>) {
        // Of a live table everything is in memory that is on disk, or on its way there.
        let is_fresh = !self.history && !self.rows.contains_key(&key);
        self.dirty.entry(key.clone()).or_insert(is_fresh);
        self.set(key, Some(row.into()));
    }

    fn set(&mut self, key: K, row: Option<Arc<V>>) {
        let is_row = usize::from(row.is_some());
        let before = self.rows.insert(key, row);
        self.count += is_row;
        self.count -= usize::from(before.flatten().is_some());
    }

    /// Changes a row in place; says whether there was one.
    pub fn change(&mut self, key: &K, change: impl FnOnce(&mut V)) -> bool {
        let Some(mut row) = self.get(key) else { return false };
        change(Arc::make_mut(&mut row));
        self.dirty.entry(key.clone()).or_insert(false);
        self.set(key.clone(), Some(row));
        true
    }

    /// Removes a row; removing none is no change.
    pub fn remove(&mut self, key: &K) {
        if self.dirty.get(key) == Some(&true) {
            self.dirty.remove(key);
            let row = self.rows.remove(key).flatten();
            self.count -= usize::from(row.is_some());
        } else if self.contains(key) {
            self.dirty.entry(key.clone()).or_insert(false);
            self.set(key.clone(), None);
        }
    }

    /// The rows in memory by key. Of a live table these are all rows.
    pub fn rows(&self) -> impl DoubleEndedIterator<Item = (&K, &Arc<V>)> {
        self.rows.iter().filter_map(|(key, row)| Some((key, row.as_ref()?)))
    }

    /// The rows in memory from `from` on.
    pub fn rows_from(&self, from: K) -> impl Iterator<Item = (&K, &Arc<V>)> {
        self.rows.range(from..).filter_map(|(key, row)| Some((key, row.as_ref()?)))
    }

    /// How many rows are in memory.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether no row is in memory.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Walks all rows beyond `from` (exclusive), in memory and written ones, until `visit` breaks.
    pub fn walk(
        &self,
        from: Option<&K>,
        order: Order,
        mut visit: impl FnMut(&K, Arc<V>) -> ControlFlow<()>,
    ) {
        let mut cursor = from.cloned();
        loop {
            let (page, complete) = self.page(cursor.as_ref(), order);
            for (key, row) in &page {
                if let Some(row) = row
                    && visit(key, row.clone()).is_break()
                {
                    return;
                }
            }
            match page.into_keys_in(order) {
                Some(last) if !complete => cursor = Some(last),
                _ => return,
            }
        }
    }

    /// One stretch of the walk: memory over disk, cut where the disk's page ends.
    fn page(&self, from: Option<&K>, order: Order) -> (Page<K, V>, bool) {
        const ROWS_PER_PAGE: usize = 256;
        let raw = match &self.backing {
            Some(backing) if self.history => {
                let from = from.map(Key::encode);
                backing.scan(self.number, from.as_deref(), order, ROWS_PER_PAGE)
            }
            _ => Vec::new(),
        };
        let complete = raw.len() < ROWS_PER_PAGE;
        let mut rows: BTreeMap<K, Option<Arc<V>>> = raw
            .into_iter()
            .filter_map(|(key, row)| Some((K::decode(&key)?, Some(Arc::new(readable(&row))))))
            .collect();
        let end = match order {
            Order::Ascending => rows.last_key_value(),
            Order::Descending => rows.first_key_value(),
        }
        .map(|(key, _)| key.clone())
        .filter(|_| !complete);
        let bounds = match order {
            Order::Ascending => (from.map_or(Bound::Unbounded, Bound::Excluded), until(&end)),
            Order::Descending => (until(&end), from.map_or(Bound::Unbounded, Bound::Excluded)),
        };
        let bounds = (bounds.0.cloned(), bounds.1.cloned());
        rows.extend(self.rows.range(bounds).map(|(key, row)| (key.clone(), row.clone())));
        (Page { rows, order }, complete)
    }
}

impl<K: Key, V: Row> Table<(u128, K), V> {
    /// The rows of an expiry table that are due at `at`, oldest first, at most `most`.
    pub fn due(&self, at: Timestamp, most: usize) -> BTreeSet<(u128, K)> {
        let mut due = BTreeSet::new();
        self.walk(None, Order::Ascending, |key, _| {
            if key.0 > u128::from(at.millis()) || due.len() >= most {
                return ControlFlow::Break(());
            }
            due.insert(key.clone());
            ControlFlow::Continue(())
        });
        due
    }
}

fn until<K>(end: &Option<K>) -> Bound<&K> {
    end.as_ref().map_or(Bound::Unbounded, Bound::Included)
}

struct Page<K, V> {
    rows: BTreeMap<K, Option<Arc<V>>>,
    order: Order,
}

impl<K: Key, V> Page<K, V> {
    fn into_keys_in(mut self, order: Order) -> Option<K> {
        match order {
            Order::Ascending => self.rows.pop_last(),
            Order::Descending => self.rows.pop_first(),
        }
        .map(|(key, _)| key)
    }
}

impl<'a, K: Key, V> IntoIterator for &'a Page<K, V> {
    type Item = (&'a K, &'a Option<Arc<V>>);
    type IntoIter = Box<dyn Iterator<Item = Self::Item> + 'a>;

    fn into_iter(self) -> Self::IntoIter {
        match self.order {
            Order::Ascending => Box::new(self.rows.iter()),
            Order::Descending => Box::new(self.rows.iter().rev()),
        }
    }
}

fn readable<V: Row>(bytes: &[u8]) -> V {
    match codec::decode(bytes) {
        Ok(row) => row,
        Err(error) => unreachable!("a row we wrote is not readable: {error}"),
    }
}

impl<K: Key, V: Row> AnyTable for Table<K, V> {
    fn number(&self) -> u8 {
        self.number
    }

    fn take_changes(&mut self, out: &mut Vec<Change>) {
        debug_assert!(self.in_flight.is_empty(), "one write of a table at a time");
        self.in_flight = std::mem::take(&mut self.dirty).into_keys().collect();
        out.reserve(self.in_flight.len());
        out.extend(self.in_flight.iter().map(|key| Change {
            table: self.number,
            key: key.encode(),
            row: self.rows.get(key).cloned().flatten().map(|row| row as Arc<dyn Encode>),
        }));
    }

    fn written(&mut self) {
        let evict = self.history && self.backing.is_some();
        for key in std::mem::take(&mut self.in_flight) {
            if self.dirty.contains_key(&key) {
                continue;
            }
            let gone = self.rows.get(&key).is_some_and(|row| row.is_none() || evict);
            if gone {
                let row = self.rows.remove(&key).flatten();
                self.count -= usize::from(row.is_some());
            }
        }
    }

    fn is_history(&self) -> bool {
        self.history
    }

    fn load(&mut self, key: &[u8], row: &[u8]) -> Result<(), DecodeError> {
        let key = K::decode(key).ok_or(DecodeError::Version(None))?;
        self.set(key, Some(Arc::new(codec::decode(row)?)));
        Ok(())
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.count = 0;
        self.dirty.clear();
        self.in_flight.clear();
    }

    fn set_backing(&mut self, backing: Arc<dyn Backing>) {
        self.backing = Some(backing);
    }

    fn pending(&self) -> usize {
        self.dirty.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::RwLock;

    #[derive(Default)]
    struct Disk(RwLock<BTreeMap<Vec<u8>, Vec<u8>>>);

    impl Backing for Disk {
        fn get(&self, _: u8, key: &[u8]) -> Option<Vec<u8>> {
            self.0.read().expect("not poisoned").get(key).cloned()
        }
        fn scan(&self, _: u8, from: Option<&[u8]>, order: Order, limit: usize) -> Vec<RawRow> {
            let rows = self.0.read().expect("not poisoned");
            let all = rows.iter().map(|(key, row)| (key.clone(), row.clone()));
            match order {
                Order::Ascending => all
                    .filter(|(key, _)| from.is_none_or(|from| **key > *from))
                    .take(limit)
                    .collect(),
                Order::Descending => all
                    .rev()
                    .filter(|(key, _)| from.is_none_or(|from| **key < *from))
                    .take(limit)
                    .collect(),
            }
        }
    }

    fn flush(table: &mut Table<u64, u64>, disk: &Disk) {
        let mut changes = Vec::new();
        table.take_changes(&mut changes);
        let mut rows = disk.0.write().expect("not poisoned");
        for change in changes {
            match change.row {
                Some(row) => rows.insert(change.key, row.bytes()),
                None => rows.remove(&change.key),
            };
        }
        drop(rows);
        table.written();
    }

    fn keys(table: &Table<u64, u64>, from: Option<u64>, order: Order) -> Vec<u64> {
        let mut seen = Vec::new();
        table.walk(from.as_ref(), order, |key, _| {
            seen.push(*key);
            ControlFlow::Continue(())
        });
        seen
    }

    #[test]
    fn eviction_changes_no_answer() {
        let disk = Arc::new(Disk::default());
        let mut table = Table::<u64, u64>::history(1);
        table.set_backing(disk.clone());
        for key in 0..1000 {
            table.put(key, key * 2);
        }
        flush(&mut table, &disk);
        assert!(table.is_empty(), "written history leaves memory");
        assert_eq!(table.get(&7).as_deref(), Some(&14));
        table.change(&7, |row| *row = 15);
        table.remove(&8);
        table.put(2000, 1_u64);
        table.put(2000, 1_u64);
        assert_eq!((table.len(), table.rows().count()), (2, 2));
        assert_eq!(table.get(&7).as_deref(), Some(&15));
        assert_eq!(table.get(&8), None, "the mark hides the row that is still on disk");
        let up = keys(&table, None, Order::Ascending);
        assert_eq!(up.len(), 1000, "1000 rows, one removed, one added");
        assert!(up.is_sorted() && !up.contains(&8) && up.ends_with(&[2000]));
        let mut down = keys(&table, None, Order::Descending);
        down.reverse();
        assert_eq!(up, down);
        assert_eq!(keys(&table, Some(996), Order::Ascending), [997, 998, 999, 2000]);
        flush(&mut table, &disk);
        assert_eq!(keys(&table, None, Order::Ascending), up);
    }

    #[test]
    fn a_live_table_and_its_disk_agree_whatever_comes_between_flushes() {
        // A fixed walk over all orders of a few steps on two keys.
        let steps = 5_u32;
        for walk in 0..6_u32.pow(steps) {
            let (disk, mut table) = (Disk::default(), Table::<u64, u64>::live(1));
            let (mut model, mut left) = (BTreeMap::new(), walk);
            let mut is_writing = false;
            for step in 0..u64::from(steps) {
                let (what, key) = (left % 6, u64::from(left % 2));
                left /= 6;
                match what {
                    0 | 1 => {
                        table.put(key, step);
                        model.insert(key, step);
                    }
                    2 | 3 => {
                        table.remove(&key);
                        model.remove(&key);
                    }
                    4 if !is_writing => {
                        let mut changes = vec![];
                        table.take_changes(&mut changes);
                        for change in changes {
                            let mut rows = disk.0.write().expect("not poisoned");
                            match change.row {
                                Some(row) => rows.insert(change.key, row.bytes()),
                                None => rows.remove(&change.key),
                            };
                        }
                        is_writing = true;
                    }
                    _ => {
                        table.written();
                        is_writing = false;
                    }
                }
                let rows: BTreeMap<u64, u64> = table.rows().map(|(k, row)| (*k, **row)).collect();
                assert_eq!((&rows, table.len()), (&model, model.len()), "walk {walk}");
            }
            table.written();
            flush(&mut table, &disk);
            let rows = disk.0.read().expect("not poisoned");
            let read = |(key, row): (&Vec<u8>, &Vec<u8>)| {
                (u64::decode(key).expect("a key"), codec::decode::<u64>(row).expect("a row"))
            };
            assert_eq!(rows.iter().map(read).collect::<BTreeMap<_, _>>(), model, "walk {walk}");
        }
    }

    #[test]
    fn a_row_that_is_gone_before_it_was_written_leaves_nothing_to_write() {
        let mut table = Table::<u64, u64>::live(1);
        table.put(1, 10_u64);
        table.put(1, 11_u64);
        table.remove(&1);
        assert_eq!((table.pending(), table.len()), (0, 0));
        table.put(1, 12_u64);
        assert_eq!((table.pending(), table.get(&1).as_deref()), (1, Some(&12)));
    }
}
