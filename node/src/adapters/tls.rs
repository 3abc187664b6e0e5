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

use super::authority::Authority;

/// Where the certificate and its authority are.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// The authority that clients should trust.
    pub authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Certificates {
    /// Below `folder`; signed by the cluster's authority if they are not there.
    pub fn open(folder: &Path, names: &[String], authority: &Authority) -> anyhow::Result<Self> {
        let this = Self {
            authority: folder.join("ca.pem"),
            certificate: folder.join("cert.pem"),
            key: folder.join("key.pem"),
        };
        if !this.key.exists() {
            fs::create_dir_all(folder)?;
            this.make(names, authority).context("the certificate could not be made")?;
        }
        Ok(this)
    }

    fn make(&self, names: &[String], authority: &Authority) -> anyhow::Result<()> {
        let uses = [ExtendedKeyUsagePurpose::ServerAuth];
        let issued = authority.issue("Roost", names, &uses)?;
        fs::write(&self.authority, &authority.pem)?;
        fs::write(&self.certificate, issued.pem + &authority.pem)?;
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
