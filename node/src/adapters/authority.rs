//! The cluster's certificate authority. It is made with the cluster, shared with every node that
//! joins, and signs two kinds of certificates: a node's own, for its peers, and its front door's.

use std::{fs, path::Path};

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};

use crate::keys::{ClusterSecret, write_secret};

/// The authority and its key, as PEM.
#[derive(Clone, Debug)]
pub struct Authority {
    /// Its certificate, for whoever should trust it.
    pub pem: String,
    key_pem: String,
}

/// A certificate and its key, as PEM.
pub struct Issued {
    /// The certificate.
    pub pem: String,
    /// Its key.
    pub key_pem: String,
}

impl Authority {
    /// Of the folder of keys; made if it is not there.
    pub fn open(keys: &Path) -> anyhow::Result<Self> {
        let (certificate, key) = (keys.join("ca.pem"), keys.join("ca-key.pem"));
        if !certificate.exists() {
            let made = Self::make().context("the authority could not be made")?;
            made.write(keys)?;
            return Ok(made);
        }
        let read = |path: &Path| {
            fs::read_to_string(path).with_context(|| format!("the key file {}", path.display()))
        };
        Ok(Self { pem: read(&certificate)?, key_pem: read(&key)? })
    }

    fn make() -> anyhow::Result<Self> {
        let key = KeyPair::generate()?;
        let pem = params()?.self_signed(&key)?.pem();
        Ok(Self { pem, key_pem: key.serialize_pem() })
    }

    /// From a cluster's secret: the same on every machine that has it.
    pub fn derived(secret: &ClusterSecret) -> anyhow::Result<Self> {
        // An Ed25519 key as PKCS #8 (RFC 8410) is this head and the seed; its signatures have no dice in
        // them, so the certificate is the same everywhere too.
        let head = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
        let document = [&head[..], &secret.key("authority")].concat();
        let key = KeyPair::try_from(document).context("the authority's key")?;
        let pem = params()?.self_signed(&key)?.pem();
        Ok(Self { pem, key_pem: key.serialize_pem() })
    }

    /// The authority that another node told of.
    pub fn told(pem: String, key_pem: String) -> Self {
        Self { pem, key_pem }
    }

    /// Its key, for a node that joins.
    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    /// Keeps it in the folder of keys.
    pub fn write(&self, keys: &Path) -> anyhow::Result<()> {
        // The certificate comes last: where it is, the key is too.
        write_secret(&keys.join("ca-key.pem"), self.key_pem.as_bytes())?;
        write_secret(&keys.join("ca.pem"), self.pem.as_bytes())?;
        Ok(())
    }

    /// The certificate itself.
    pub fn certificate(&self) -> anyhow::Result<CertificateDer<'static>> {
        CertificateDer::from_pem_slice(self.pem.as_bytes()).context("ca.pem is damaged")
    }

    /// A certificate for these names and uses.
    pub fn issue(
        &self,
        common_name: &str,
        names: &[String],
        uses: &[ExtendedKeyUsagePurpose],
    ) -> anyhow::Result<Issued> {
        let mut wanted = CertificateParams::new(names.to_vec())?;
        wanted.distinguished_name.push(DnType::CommonName, common_name);
        wanted.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        wanted.extended_key_usages = uses.to_vec();
        wanted.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let issuer = Issuer::new(params()?, KeyPair::from_pem(&self.key_pem)?);
        let pem = wanted.signed_by(&key, &issuer)?.pem();
        Ok(Issued { pem, key_pem: key.serialize_pem() })
    }

    /// A node's identity towards its peers; made once and kept.
    pub fn peer_identity(
        &self,
        keys: &Path,
        raft_id: u64,
    ) -> anyhow::Result<cluster::peer::tls::PeerIdentity> {
        let (certificate, key) = (keys.join("node.pem"), keys.join("node-key.pem"));
        if !certificate.exists() {
            let names = [cluster::peer::name_of(raft_id), cluster::peer::ANY_NODE.to_owned()];
            let uses = [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
            let issued = self.issue("Roost node", &names, &uses)?;
            write_secret(&key, issued.key_pem.as_bytes())?;
            write_secret(&certificate, issued.pem.as_bytes())?;
        }
        Ok(cluster::peer::tls::PeerIdentity {
            authority: self.certificate()?,
            certificate: CertificateDer::from_pem_file(&certificate)?,
            key: PrivateKeyDer::from_pem_file(&key)?,
        })
    }
}

/// The same for every node of the cluster: the key alone is secret.
fn params() -> anyhow::Result<CertificateParams> {
    let mut authority = CertificateParams::new(vec![])?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    authority.distinguished_name.push(DnType::CommonName, "Roost cluster authority");
    Ok(authority)
}
