//! Seals what must never be plain on disk: XChaCha20-Poly1305 under the node's key, with the place
//! where the secret belongs bound in, so that a sealed value can't be moved to another place.

use chacha20poly1305::{
    Key, KeyInit as _, XChaCha20Poly1305, XNonce,
    aead::{Aead as _, Payload},
};
use zeroize::Zeroizing;

use crate::ports::Entropy;

const NONCE_BYTES: usize = 24;

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
}
