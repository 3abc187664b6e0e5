//! Certificates. A first start makes a certificate authority of its own and a certificate for the
//! names this node is reached by; both stay.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};

/// Where the certificate and its authority are.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// The authority that clients should trust.
    pub authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Certificates {
    /// Below `folder`; made if they are not there.
    pub fn open(folder: &Path, names: &[String]) -> anyhow::Result<Self> {
        let this = Self {
            authority: folder.join("ca.pem"),
            certificate: folder.join("cert.pem"),
            key: folder.join("key.pem"),
        };
        if !this.key.exists() {
            fs::create_dir_all(folder)?;
            this.make(names).context("the certificate could not be made")?;
        }
        Ok(this)
    }

    fn make(&self, names: &[String]) -> anyhow::Result<()> {
        let mut authority = CertificateParams::new(vec![])?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        authority.distinguished_name.push(DnType::CommonName, "Roost development authority");
        let authority_key = KeyPair::generate()?;
        let authority_pem = authority.self_signed(&authority_key)?.pem();
        let mut params = CertificateParams::new(names.to_vec())?;
        params.distinguished_name.push(DnType::CommonName, "Roost node");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &Issuer::new(authority, authority_key))?;
        // The authority's key is not kept: nobody can sign with it later.
        fs::write(&self.authority, &authority_pem)?;
        fs::write(&self.certificate, certificate.pem() + &authority_pem)?;
        crate::keys::write_secret(&self.key, key.serialize_pem().as_bytes())?;
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
