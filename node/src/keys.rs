//! Key files: made at first start, readable by their owner alone, never shown.

use std::{fs, io, io::Write as _, os::unix::fs::OpenOptionsExt as _, path::Path};

use anyhow::{Context as _, bail};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};

use crate::{adapters::system::random_bytes, hex};

/// The keys of a cluster, as each of its nodes has them.
#[derive(Clone)]
pub struct Keys {
    /// Hashes API keys.
    pub pepper: [u8; 32],
    /// Seals secrets.
    pub master: [u8; 32],
    /// Signs links and cursors.
    pub signing: [u8; 32],
    /// Seals gossip.
    pub gossip: [u8; 32],
}

impl Keys {
    /// Below `folder`; made if they are not there.
    pub fn open(folder: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(folder)?;
        let key = |name: &str| {
            let path = folder.join(name);
            read_or_make(&path).with_context(|| format!("the key file {}", path.display()))
        };
        Ok(Self {
            pepper: key("pepper.key")?,
            master: key("master.key")?,
            signing: key("signing.key")?,
            gossip: key("gossip.key")?,
        })
    }

    /// From a cluster's secret: the same on every machine that has it.
    pub fn derived(secret: &ClusterSecret) -> Self {
        Self {
            pepper: secret.key("pepper"),
            master: secret.key("master"),
            signing: secret.key("signing"),
            gossip: secret.key("gossip"),
        }
    }

    /// Of a folder that has them all; the key of gossip is new.
    pub fn kept(folder: &Path) -> anyhow::Result<Self> {
        let key = |name: &str| {
            let path = folder.join(name);
            let text = fs::read_to_string(&path).map_err(anyhow::Error::from);
            let key = text.and_then(|text| parse(text.trim()));
            key.with_context(|| format!("the key file {}", path.display()))
        };
        Ok(Self {
            pepper: key("pepper.key")?,
            master: key("master.key")?,
            signing: key("signing.key")?,
            gossip: random_bytes::<32>(),
        })
    }

    /// Tells these keys from others, and nothing of what they are.
    pub fn fingerprint(&self) -> String {
        let mut digest = Sha256::new();
        digest.update(b"roost keys");
        [&self.pepper, &self.master, &self.signing].iter().for_each(|key| digest.update(key));
        hex(&digest.finalize())
    }

    /// Keeps the keys that another node told of.
    pub fn write(&self, folder: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(folder)?;
        let keys = [
            ("pepper.key", &self.pepper),
            ("master.key", &self.master),
            ("signing.key", &self.signing),
            ("gossip.key", &self.gossip),
        ];
        for (name, key) in keys {
            write_secret(&folder.join(name), hex(key).as_bytes())?;
        }
        Ok(())
    }
}

/// Least characters of a cluster's secret.
const SECRET_CHARACTERS_MIN: usize = 32;

/// What an orchestrator gives to all nodes of a cluster, so that they find together without a token for
/// each: all keys and the authority are made from it.
pub struct ClusterSecret(zeroize::Zeroizing<String>);

impl ClusterSecret {
    /// Reads it.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("the cluster's secret {}", path.display()))?;
        let text = zeroize::Zeroizing::new(text.trim().to_owned());
        if text.len() < SECRET_CHARACTERS_MIN {
            bail!(
                "{} must hold at least {SECRET_CHARACTERS_MIN} characters, such as `openssl rand -hex 32` prints",
                path.display()
            );
        }
        Ok(Self(text))
    }

    /// The key for one purpose (HKDF's expansion, RFC 5869, of one block).
    pub fn key(&self, purpose: &str) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.as_bytes()).expect("any length fits");
        mac.update(b"roost ");
        mac.update(purpose.as_bytes());
        mac.update(&[1]);
        mac.finalize().into_bytes().into()
    }
}

fn read_or_make(path: &Path) -> anyhow::Result<[u8; 32]> {
    match fs::read_to_string(path) {
        Ok(text) => parse(text.trim()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key = random_bytes::<32>();
            write_secret(path, hex(&key).as_bytes())?;
            Ok(key)
        }
        Err(error) => Err(error.into()),
    }
}

const NOT_A_KEY: &str = "it must hold 64 hexadecimal digits";

/// A key from its 64 hexadecimal digits.
pub fn parse(text: &str) -> anyhow::Result<[u8; 32]> {
    if text.len() != 64 || !text.is_ascii() {
        bail!(NOT_A_KEY);
    }
    let mut key = [0; 32];
    for (place, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[place * 2..place * 2 + 2], 16).context(NOT_A_KEY)?;
    }
    Ok(key)
}

/// Writes a file that only its owner can read, durable on return.
pub fn write_secret(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    match path.parent() {
        Some(folder) => fs::File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}
