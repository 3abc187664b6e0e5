//! Key files: made at first start, readable by their owner alone, never shown.

use std::{fs, io, io::Write as _, os::unix::fs::OpenOptionsExt as _, path::Path};

use actors::seal::{self, MasterKey};
use anyhow::{Context as _, bail};
use domain::data_key::MasterKeyId;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};

use crate::{adapters::system::random_bytes, hex};

/// The keys of a cluster, as each of its nodes has them.
#[derive(Clone)]
pub struct Keys {
    /// Hashes API keys.
    pub pepper: [u8; 32],
    /// Seals what secrets are sealed with: the master keys, and where they are.
    pub masters: Vec<MasterKey>,
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
            masters: open_masters(folder)?,
            signing: key("signing.key")?,
            gossip: key("gossip.key")?,
        })
    }

    /// From a cluster's secret: the same on every machine that has it.
    pub fn derived(secret: &ClusterSecret) -> Self {
        Self {
            pepper: secret.key("pepper"),
            masters: vec![MasterKey::new(secret.key("master"))],
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
            masters: kept_masters(folder)?,
            signing: key("signing.key")?,
            gossip: random_bytes::<32>(),
        })
    }

    /// Tells these keys from others, and nothing of what they are. The master key is the one that data
    /// keys are sealed with.
    pub fn fingerprint(&self, master: MasterKeyId) -> String {
        let mut digest = Sha256::new();
        digest.update(b"roost keys");
        [self.pepper.as_slice(), &master, &self.signing]
            .iter()
            .for_each(|part| digest.update(part));
        hex(&digest.finalize())
    }

    /// Whether a fingerprint is one of these keys.
    pub fn fit(&self, fingerprint: &str) -> bool {
        self.masters.iter().any(|master| self.fingerprint(master.id()) == fingerprint)
    }

    /// Keeps the keys that another node told of.
    pub fn write(&self, folder: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(folder)?;
        let keys = [
            ("pepper.key", &self.pepper),
            ("signing.key", &self.signing),
            ("gossip.key", &self.gossip),
        ];
        for (name, key) in keys {
            write_secret(&folder.join(name), hex(key).as_bytes())?;
        }
        match masters_of_environment()? {
            Some(_) => Ok(()),
            None => Ok(write_masters(folder, &self.masters)?),
        }
    }
}

/// The variable that a node may have its master key from instead of from a file: 64 hexadecimal digits, or
/// two such keys with a comma between while the key changes, the new one first.
pub const MASTER_KEY: &str = "ROOST_MASTER_KEY";
const MASTER_FILE: &str = "master.key";

/// The master keys that the environment has; `None` if they are in a file.
pub fn masters_of_environment() -> anyhow::Result<Option<Vec<MasterKey>>> {
    match std::env::var(MASTER_KEY) {
        Ok(text) => {
            let text = zeroize::Zeroizing::new(text);
            let keys: anyhow::Result<Vec<_>> =
                text.split(',').map(|key| parse(key.trim()).map(MasterKey::new)).collect();
            keys.map(Some).with_context(|| format!("the variable {MASTER_KEY}"))
        }
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(error).with_context(|| format!("the variable {MASTER_KEY}")),
    }
}

fn kept_masters(folder: &Path) -> anyhow::Result<Vec<MasterKey>> {
    if let Some(keys) = masters_of_environment()? {
        return Ok(keys);
    }
    let path = folder.join(MASTER_FILE);
    let read = || -> anyhow::Result<Vec<MasterKey>> {
        let text = zeroize::Zeroizing::new(fs::read_to_string(&path)?);
        text.split_whitespace().map(|key| parse(key).map(MasterKey::new)).collect()
    };
    read().with_context(|| format!("the key file {}", path.display()))
}

fn open_masters(folder: &Path) -> anyhow::Result<Vec<MasterKey>> {
    let is_elsewhere = masters_of_environment()?.is_some();
    if !is_elsewhere && !folder.join(MASTER_FILE).exists() {
        write_masters(folder, &[MasterKey::new(random_bytes::<32>())])?;
    }
    kept_masters(folder)
}

/// Keeps the master keys, one a line, the oldest first; durable on return.
pub fn write_masters(folder: &Path, keys: &[MasterKey]) -> io::Result<()> {
    let lines: Vec<String> = keys.iter().map(|key| hex(key.bytes())).collect();
    write_secret(&folder.join(MASTER_FILE), lines.join("\n").as_bytes())
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

/// A key from its 64 hexadecimal digits.
pub fn parse(text: &str) -> anyhow::Result<[u8; 32]> {
    Ok(*seal::parse(text).context("it must hold 64 hexadecimal digits")?)
}

/// Writes a file that only its owner can read, durable on return: all of it, or what was there before.
pub fn write_secret(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    match path.parent() {
        Some(folder) => fs::File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}
