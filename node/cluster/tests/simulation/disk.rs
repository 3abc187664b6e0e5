//! A disk that forgets what was not synced when its machine loses power.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use redb::StorageBackend;

use crate::dice::Dice;

/// A torn write keeps whole sectors.
const SECTOR: usize = 512;

#[derive(Clone, Debug)]
enum Change {
    Write(u64, Vec<u8>),
    Length(u64),
}

impl Change {
    fn carry_out(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Write(offset, data) => {
                let from = place(*offset);
                if bytes.len() < from + data.len() {
                    bytes.resize(from + data.len(), 0);
                }
                bytes[from..from + data.len()].copy_from_slice(data);
            }
            Self::Length(length) => bytes.resize(place(*length), 0),
        }
    }
}

fn place(offset: u64) -> usize {
    usize::try_from(offset).expect("a small file")
}

#[derive(Debug, Default)]
struct Platter {
    /// What a reader sees.
    now: Vec<u8>,
    /// What survives.
    synced: Vec<u8>,
    /// What lies between.
    loose: Vec<Change>,
    /// Counts the lives of the machine; whoever writes in the name of an earlier one is a ghost.
    life: u64,
}

/// One file of a machine. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disk {
    platter: Arc<Mutex<Platter>>,
    life: u64,
}

impl Disk {
    fn platter(&self) -> MutexGuard<'_, Platter> {
        self.platter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The power goes: of what was not synced, a part in any choice is left, the last write torn.
    pub(crate) fn lose_power(&self, dice: &mut Dice) {
        let mut platter = self.platter();
        platter.life += 1;
        let mut loose = std::mem::take(&mut platter.loose);
        loose.retain(|_| dice.is(1, 2));
        if let Some(Change::Write(_, data)) = loose.last_mut() {
            let sectors = dice.below(data.len() as u64 / SECTOR as u64 + 1);
            data.truncate(place(sectors) * SECTOR);
        }
        let mut bytes = std::mem::take(&mut platter.synced);
        loose.iter().for_each(|change| change.carry_out(&mut bytes));
        platter.now.clone_from(&bytes);
        platter.synced = bytes;
    }

    /// The file as the machine has it in its present life.
    pub(crate) fn powered(&self) -> Self {
        Self { platter: Arc::clone(&self.platter), life: self.platter().life }
    }

    fn change(&self, change: Change) {
        let mut platter = self.platter();
        if platter.life == self.life {
            change.carry_out(&mut platter.now);
            platter.loose.push(change);
        }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.platter().now.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let platter = self.platter();
        let from = place(offset);
        let part = platter.now.get(from..from + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(part);
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.change(Change::Length(length));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut platter = self.platter();
        if platter.life == self.life {
            let loose = std::mem::take(&mut platter.loose);
            let mut bytes = std::mem::take(&mut platter.synced);
            loose.iter().for_each(|change| change.carry_out(&mut bytes));
            platter.synced = bytes;
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(Change::Write(offset, data.to_vec()));
        Ok(())
    }
}
