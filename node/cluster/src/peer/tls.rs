//! The two sides of mutual TLS between nodes.

use std::sync::Arc;

use rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, ServerConfig, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
    server::{ParsedCertificate, WebPkiClientVerifier},
};
use sha2::{Digest as _, Sha256};

use super::name_of;

/// A node's certificate, its key and the cluster's authority.
pub struct PeerIdentity {
    /// The authority.
    pub authority: CertificateDer<'static>,
    /// The node's own certificate.
    pub certificate: CertificateDer<'static>,
    /// Its key.
    pub key: PrivateKeyDer<'static>,
}

impl PeerIdentity {
    fn roots(&self) -> Result<Arc<RootCertStore>, Error> {
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.clone())?;
        Ok(Arc::new(roots))
    }

    fn chain(&self) -> Vec<CertificateDer<'static>> {
        // The authority rides along: a node that joins knows no more of it than its hash.
        vec![self.certificate.clone(), self.authority.clone()]
    }

    /// Takes connections of nodes, and of those who would become one.
    pub fn server(&self) -> Result<Arc<ServerConfig>, Error> {
        let verifier = WebPkiClientVerifier::builder(self.roots()?)
            .allow_unauthenticated()
            // Strangers learn nothing of whom we trust.
            .clear_root_hint_subjects()
            .build()
            .map_err(|error| Error::General(error.to_string()))?;
        let mut config = ServerConfig::builder_with_protocol_versions(&[&rustls::version::TLS13])
            .with_client_cert_verifier(verifier)
            .with_single_cert(self.chain(), self.key.clone_key())?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }

    /// Reaches other nodes.
    pub fn client(&self) -> Result<Arc<ClientConfig>, Error> {
        let mut config = ClientConfig::builder_with_protocol_versions(&[&rustls::version::TLS13])
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(self.chain(), self.key.clone_key())?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }
}

/// Whether this certificate belongs to the node with this number.
pub fn belongs_to(certificate: &CertificateDer<'_>, raft_id: u64) -> bool {
    let Ok(name) = ServerName::try_from(name_of(raft_id)) else { return false };
    ParsedCertificate::try_from(certificate)
        .is_ok_and(|certificate| verify_server_name(&certificate, &name).is_ok())
}

/// SHA-256 of a certificate: what a join token says of the authority.
pub fn fingerprint(certificate: &CertificateDer<'_>) -> [u8; 32] {
    Sha256::digest(certificate.as_ref()).into()
}

/// Reaches the cluster whose authority has this fingerprint, without a certificate: for joining.
pub fn joining(authority: [u8; 32]) -> Arc<ClientConfig> {
    let mut config = ClientConfig::builder_with_protocol_versions(&[&rustls::version::TLS13])
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned { authority }))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

/// Trusts the one authority whose fingerprint the token brought.
#[derive(Debug)]
struct Pinned {
    authority: [u8; 32],
}

impl Pinned {
    fn verifier(&self, chain: &[CertificateDer<'_>]) -> Result<Arc<WebPkiServerVerifier>, Error> {
        let unknown = || Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let found = chain.iter().find(|certificate| fingerprint(certificate) == self.authority);
        let mut roots = RootCertStore::empty();
        roots.add(found.ok_or_else(unknown)?.clone().into_owned())?;
        WebPkiServerVerifier::builder(Arc::new(roots)).build().map_err(|_| unknown())
    }
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verifier(intermediates)?.verify_server_cert(certificate, &[], name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("nodes speak TLS 1.3".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let schemes =
            &rustls::crypto::aws_lc_rs::default_provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, schemes)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        provider.signature_verification_algorithms.supported_schemes()
    }
}
