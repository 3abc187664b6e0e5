//! Seals what must never be plain on disk: XChaCha20-Poly1305, with the place where the secret belongs
//! bound in, so that a sealed value can't be moved to another place.
//!
//! Every organization's secrets have a data key of their own; the directory holds it sealed with the
//! master key ([`domain::data_key`]). A node has one master key, and two while they change.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use chacha20poly1305::{
    Key, KeyInit as _, XChaCha20Poly1305, XNonce,
    aead::{Aead as _, Payload},
};
use domain::{
    OrgId, Rejection,
    data_key::{self, DataKey, MasterKeyId},
    directory::Command,
};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::{
    ports::{Entropy, ProposeError},
    root::lock,
    world::World,
};

const NONCE_BYTES: usize = 24;
/// How often a data key is asked for while the master key changes.
const TRIES_MAX: usize = 3;

/// A sealed value that can't be opened: another key, another place, or damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a sealed value could not be opened with this node's key")]
pub struct NotOpened;

/// Seals and opens.
pub struct Sealer(XChaCha20Poly1305);

impl Sealer {
    /// With this key.
    pub fn new(key: &[u8; 32]) -> Self {
        Self(XChaCha20Poly1305::new(&Key::from(*key)))
    }

    /// Seals `plain` for `place`.
    pub fn seal(&self, plain: &str, place: &str, entropy: &dyn Entropy) -> Vec<u8> {
        let mut nonce = [0; NONCE_BYTES];
        nonce[..16].copy_from_slice(&entropy.dice().to_be_bytes());
        nonce[16..].copy_from_slice(&entropy.dice().to_be_bytes()[..8]);
        let payload = Payload { msg: plain.as_bytes(), aad: place.as_bytes() };
        let sealed = self.0.encrypt(&XNonce::from(nonce), payload);
        let sealed = sealed.expect("a value in memory is not too long to seal");
        [nonce.as_slice(), &sealed].concat()
    }

    /// Opens what was sealed for `place`.
    pub fn open(&self, sealed: &[u8], place: &str) -> Result<Zeroizing<String>, NotOpened> {
        let (nonce, rest) = sealed.split_first_chunk::<NONCE_BYTES>().ok_or(NotOpened)?;
        let payload = Payload { msg: rest, aad: place.as_bytes() };
        let plain = self.0.decrypt(&XNonce::from(*nonce), payload).map_err(|_| NotOpened)?;
        String::from_utf8(plain).map(Zeroizing::new).map_err(|_| NotOpened)
    }
}

/// A master key.
#[derive(Clone, PartialEq, Eq)]
pub struct MasterKey(Zeroizing<[u8; 32]>);

impl MasterKey {
    /// Of these bytes.
    pub fn new(key: [u8; 32]) -> Self {
        Self(Zeroizing::new(key))
    }

    /// What it is known by.
    pub fn id(&self) -> MasterKeyId {
        let mut id = MasterKeyId::default();
        id.copy_from_slice(&Sha256::digest(*self.0)[..8]);
        id
    }

    /// The key itself.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Seals a data key.
    fn wrap(&self, owner: OrgId, key: &str, entropy: &dyn Entropy) -> Vec<u8> {
        Sealer::new(&self.0).seal(key, &data_key::place(owner), entropy)
    }
}

/// The keys of this node that everything else is sealed with.
pub struct Keychain {
    masters: RwLock<Vec<MasterKey>>,
    opened: Mutex<HashMap<OrgId, Opened>>,
}

/// A data key that was opened, with what it was opened from.
struct Opened {
    from: Vec<u8>,
    sealer: Arc<Sealer>,
}

impl Keychain {
    /// With these master keys; the first is used where none was used yet.
    pub fn new(masters: Vec<MasterKey>) -> Self {
        Self { masters: RwLock::new(masters), opened: Mutex::default() }
    }

    /// The master keys, the first first.
    pub fn masters(&self) -> Vec<MasterKey> {
        self.masters.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on these.
    pub fn set_masters(&self, masters: Vec<MasterKey>) {
        *self.masters.write().unwrap_or_else(PoisonError::into_inner) = masters;
    }

    /// The master key of this name.
    pub fn master(&self, id: MasterKeyId) -> Option<MasterKey> {
        self.masters().into_iter().find(|key| key.id() == id)
    }

    fn plain(&self, owner: OrgId, row: &DataKey) -> Result<Zeroizing<String>, NotOpened> {
        let master = self.master(row.master).ok_or(NotOpened)?;
        Sealer::new(&master.0).open(&row.sealed, &data_key::place(owner))
    }

    fn open(&self, owner: OrgId, row: &DataKey) -> Result<Arc<Sealer>, NotOpened> {
        let mut opened = lock(&self.opened);
        if let Some(known) = opened.get(&owner).filter(|known| known.from == row.sealed) {
            return Ok(Arc::clone(&known.sealer));
        }
        let key = parse(&self.plain(owner, row)?).ok_or(NotOpened)?;
        let sealer = Arc::new(Sealer::new(&key));
        opened.insert(owner, Opened { from: row.sealed.clone(), sealer: Arc::clone(&sealer) });
        Ok(sealer)
    }
}

/// A key from its 64 hexadecimal digits.
pub fn parse(text: &str) -> Option<Zeroizing<[u8; 32]>> {
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    let mut key = Zeroizing::new([0; 32]);
    for (place, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[place * 2..place * 2 + 2], 16).ok()?;
    }
    Some(key)
}

impl World {
    /// What an owner's secrets are opened with. Looks into the directory: not to be asked while that is
    /// held for writing.
    pub fn opener(&self, owner: OrgId) -> Result<Arc<Sealer>, NotOpened> {
        let row = self.directory().read().data_keys.get(&owner).ok_or(NotOpened)?;
        self.keychain.open(owner, &row)
    }

    /// What an owner's secrets are sealed with; made if there is nothing yet.
    pub async fn sealer(&self, owner: OrgId) -> Result<Arc<Sealer>, ProposeError> {
        for _ in 0..TRIES_MAX {
            let (row, current) = {
                let directory = self.directory().read();
                (directory.data_keys.get(&owner), directory.master_key())
            };
            if let Some(row) = row {
                return self.keychain.open(owner, &row).map_err(|error| {
                    tracing::error!(%error, %owner, "this node lacks the master key of a data key");
                    ProposeError::Unavailable
                });
            }
            let masters = self.keychain.masters();
            let fits = |key: &&MasterKey| current.is_none_or(|current| key.id() == current);
            let master = masters.iter().find(fits).ok_or(ProposeError::Unavailable)?;
            let key = Box::new(self.new_data_key(owner, master));
            match self.ask(Command::KeepDataKey { owner, key }, None).await?.result {
                // Without a row yet, this copy of the directory is behind: the next look tells.
                Ok(_) | Err(Rejection::StaleObject) => {
                    self.ports.ledger.refresh_directory().await?;
                }
                Err(reason) => return Err(reason.into()),
            }
        }
        Err(ProposeError::Unavailable)
    }

    fn new_data_key(&self, owner: OrgId, master: &MasterKey) -> DataKey {
        let entropy = &*self.ports.entropy;
        let key = Zeroizing::new(format!("{:032x}{:032x}", entropy.dice(), entropy.dice()));
        DataKey {
            sealed: master.wrap(owner, &key, entropy),
            master: master.id(),
            created_at: self.now(),
        }
    }

    /// All data keys as they are sealed with another master key.
    pub fn sealed_anew(&self, master: &MasterKey) -> Result<Vec<(OrgId, Vec<u8>)>, NotOpened> {
        let directory = self.directory().read();
        let anew = |(owner, row): (&OrgId, &Arc<DataKey>)| {
            let key = self.keychain.plain(*owner, row)?;
            Ok((*owner, master.wrap(*owner, &key, &*self.ports.entropy)))
        };
        directory.data_keys.rows().map(anew).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dice;
    impl Entropy for Dice {
        fn dice(&self) -> u128 {
            4
        }
    }

    #[test]
    fn a_value_opens_only_with_its_key_and_in_its_place() {
        let sealer = Sealer::new(&[1; 32]);
        let sealed = sealer.seal("hunter2", "agent_1/TOKEN", &Dice);
        assert!(!sealed.windows(7).any(|window| window == b"hunter2"));
        assert_eq!(sealer.open(&sealed, "agent_1/TOKEN").expect("opens").as_str(), "hunter2");
        assert_eq!(sealer.open(&sealed, "agent_2/TOKEN"), Err(NotOpened));
        assert_eq!(Sealer::new(&[2; 32]).open(&sealed, "agent_1/TOKEN"), Err(NotOpened));
        assert_eq!(sealer.open(&sealed[..10], "agent_1/TOKEN"), Err(NotOpened));
    }

    #[test]
    fn a_data_key_opens_with_its_master_key_for_its_owner() {
        let (one, other) = (MasterKey::new([1; 32]), MasterKey::new([2; 32]));
        let key = format!("{:064x}", 77);
        let (sealed, master) = (one.wrap(OrgId(5), &key, &Dice), one.id());
        let row = DataKey { sealed, master, created_at: domain::Timestamp::default() };
        let chain = Keychain::new(vec![other.clone(), one.clone()]);
        let sealed = chain.open(OrgId(5), &row).expect("opens").seal("hunter2", "here", &Dice);
        assert_eq!(parse(&key).expect("a key")[31], 77);
        let again = chain.open(OrgId(5), &row).expect("opens").open(&sealed, "here");
        assert_eq!(again.expect("opens").as_str(), "hunter2");
        assert!(Keychain::new(vec![one]).open(OrgId(6), &row).is_err(), "another owner");
        assert!(Keychain::new(vec![other]).open(OrgId(5), &row).is_err(), "another master key");
        assert!(parse("12").is_none() && parse(&"g".repeat(64)).is_none());
    }
}
