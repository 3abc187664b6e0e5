//! Certificates for servers that others run, each of an authority of its own.

use rcgen::{BasicConstraints, Certificate, CertificateParams, IsCa, Issuer, KeyPair};

/// A server's certificate.
pub(crate) struct Certified {
    /// The authority's own certificate (PEM), for clients to trust.
    pub(crate) authority: String,
    /// The server's.
    pub(crate) own: Certificate,
    /// Its key.
    pub(crate) key: KeyPair,
}

impl Certified {
    /// For a server of these names.
    pub(crate) fn new(names: &[&str]) -> Self {
        let [ca_key, key] = [(); 2].map(|()| KeyPair::generate().expect("a key"));
        let mut ca = CertificateParams::new(vec![]).expect("parameters");
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = ca.self_signed(&ca_key).expect("an authority").pem();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let own = CertificateParams::new(names).expect("names");
        let own = own.signed_by(&key, &Issuer::from_params(&ca, &ca_key));
        Self { authority, own: own.expect("a certificate"), key }
    }
}
