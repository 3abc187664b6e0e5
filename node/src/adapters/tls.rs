//! The front door's certificate: for the names this node is reached by, signed by the cluster's
//! authority at the first start.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use rcgen::ExtendedKeyUsagePurpose;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::authority::Authority;
use crate::hex;

/// Where the certificate and its authority are.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// The authority that clients should trust.
    pub authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
    issued: PathBuf,
}

/// What is remembered of a certificate that was made here.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct Issued {
    names: Vec<String>,
    sha256: String,
}

impl Certificates {
    /// Below `folder`; signed by the cluster's authority if they are not there, and anew if this node
    /// is reached by other names than before. A certificate that the operator put there is left alone.
    pub fn open(folder: &Path, names: &[String], authority: &Authority) -> anyhow::Result<Self> {
        let this = Self {
            authority: folder.join("ca.pem"),
            certificate: folder.join("cert.pem"),
            key: folder.join("key.pem"),
            issued: folder.join("issued.json"),
        };
        if !this.key.exists() || this.is_ours_for_others(names) {
            fs::create_dir_all(folder)?;
            this.make(names, authority).context("the certificate could not be made")?;
        }
        Ok(this)
    }

    fn is_ours_for_others(&self, names: &[String]) -> bool {
        let read = |path: &Path| fs::read(path).unwrap_or_default();
        let Ok(issued) = serde_json::from_slice::<Issued>(&read(&self.issued)) else {
            return false;
        };
        let is_ours = issued.sha256 == hex(&Sha256::digest(read(&self.certificate)));
        is_ours && names.iter().any(|name| !issued.names.contains(name))
    }

    fn make(&self, names: &[String], authority: &Authority) -> anyhow::Result<()> {
        let uses = [ExtendedKeyUsagePurpose::ServerAuth];
        let issued = authority.issue("Roost", names, &uses)?;
        fs::write(&self.authority, &authority.pem)?;
        let chain = issued.pem + &authority.pem;
        fs::write(&self.certificate, &chain)?;
        let made = Issued { names: names.to_vec(), sha256: hex(&Sha256::digest(&chain)) };
        fs::write(&self.issued, serde_json::to_vec_pretty(&made)?)?;
        crate::keys::write_secret(&self.key, issued.key_pem.as_bytes())?;
        Ok(())
    }

    /// TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1.
    pub fn server_config(&self) -> anyhow::Result<Arc<ServerConfig>> {
        let chain =
            CertificateDer::pem_file_iter(&self.certificate)?.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_file(&self.key)?;
        let mut config =
            ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

/// Installs the one crypto provider; the first thing a process does.
pub fn install_provider() {
    // A second call in one process, as tests make it, finds it installed.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

/// Names that a node on this machine is reached by.
pub fn local_names() -> Vec<String> {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_owned());
    let valid = |name: &String| {
        !name.is_empty()
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
    };
    let host = host.ok().filter(valid);
    ["localhost", "127.0.0.1", "::1"].map(str::to_owned).into_iter().chain(host).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_follows_the_names_unless_it_is_the_operators_own() {
        install_provider();
        let folder = tempfile::tempdir().expect("a folder");
        let authority = Authority::open(folder.path()).expect("made");
        let tls = folder.path().join("tls");
        let open = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let opened = Certificates::open(&tls, &names, &authority).expect("opens");
            fs::read_to_string(&opened.certificate).expect("a certificate")
        };
        let first = open(&["localhost"]);
        assert_eq!(open(&["localhost"]), first, "nothing has changed");
        let second = open(&["localhost", "node1"]);
        assert_ne!(second, first, "it is reached by another name now");
        fs::write(tls.join("cert.pem"), &first).expect("the operator's");
        assert_eq!(open(&["node2"]), first, "what the operator put there stays");
    }
}
