//! Every datagram is sealed: whoever has no key of the cluster can neither read nor write one. A
//! datagram carries the time, so that an old one is not believed again; it carries a fresh nonce, and
//! the key that opens it may be the present one or the one before.

use std::{
    sync::{PoisonError, RwLock},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use chacha20poly1305::{
    Key, XChaCha20Poly1305, XNonce,
    aead::{Aead as _, KeyInit as _, Payload},
};

/// Bytes that a seal adds: version, nonce, tag and time.
pub const SEAL_BYTES: usize = 1 + NONCE_BYTES + 16 + TIME_BYTES;
const NONCE_BYTES: usize = 24;
const TIME_BYTES: usize = 8;
/// The first byte of every datagram.
const VERSION: u8 = 1;
/// How far clocks may be apart, and how old a datagram may be.
const FRESH_FOR: Duration = Duration::from_secs(60);
/// Keys that open: the present one and the one before it.
const KEYS_MAX: usize = 2;

/// The keys of gossip.
pub struct Keyring {
    /// The first seals; all open.
    keys: RwLock<Vec<[u8; 32]>>,
    clock: fn() -> u64,
}

fn wall_clock() -> u64 {
    #[expect(clippy::disallowed_methods, reason = "freshness is between machines: the wall clock")]
    let now = SystemTime::now();
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Keyring {
    /// With one key.
    pub fn new(key: [u8; 32]) -> Self {
        Self { keys: RwLock::new(vec![key]), clock: wall_clock }
    }

    /// From now on this key seals; the one before still opens.
    pub fn turn(&self, key: [u8; 32]) {
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        if keys.first() != Some(&key) {
            keys.insert(0, key);
            keys.truncate(KEYS_MAX);
        }
    }

    /// Seals a message.
    pub fn seal(&self, message: &[u8]) -> Vec<u8> {
        let nonce: [u8; NONCE_BYTES] = rand::random();
        let plain = [(self.clock)().to_be_bytes().as_slice(), message].concat();
        let key = self.keys.read().unwrap_or_else(PoisonError::into_inner)[0];
        let payload = Payload { msg: &plain, aad: &[VERSION] };
        let sealed = XChaCha20Poly1305::new(&Key::from(key))
            .encrypt(&XNonce::from(nonce), payload)
            .expect("a datagram is short");
        [[VERSION].as_slice(), &nonce, &sealed].concat()
    }

    /// Opens a datagram that a member sealed lately.
    pub fn open(&self, datagram: &[u8]) -> Option<Vec<u8>> {
        let (version, rest) = datagram.split_first()?;
        let (nonce, sealed) = rest.split_first_chunk::<NONCE_BYTES>()?;
        if *version != VERSION {
            return None;
        }
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let plain = keys.iter().find_map(|key| {
            let payload = Payload { msg: sealed, aad: &[VERSION] };
            XChaCha20Poly1305::new(&Key::from(*key)).decrypt(&XNonce::from(*nonce), payload).ok()
        })?;
        let (sent, message) = plain.split_first_chunk::<TIME_BYTES>()?;
        let apart = (self.clock)().abs_diff(u64::from_be_bytes(*sent));
        if u128::from(apart) > FRESH_FOR.as_millis() {
            tracing::warn!(
                apart_ms = apart,
                "a datagram is not fresh: do the nodes' clocks agree?"
            );
            return None;
        }
        Some(message.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(key: u8, clock: fn() -> u64) -> Keyring {
        Keyring { keys: RwLock::new(vec![[key; 32]]), clock }
    }

    #[test]
    fn who_has_the_key_reads_what_was_written() {
        let sealed = at(1, || 5_000).seal(b"hello");
        assert_eq!(sealed.len(), 5 + SEAL_BYTES);
        assert_eq!(at(1, || 6_000).open(&sealed).as_deref(), Some(b"hello".as_slice()));
        assert_eq!(at(2, || 6_000).open(&sealed), None, "another key");
        assert_eq!(at(1, || 65_001).open(&sealed), None, "too old");
        assert_eq!(at(1, || 0).open(&sealed).as_deref(), Some(b"hello".as_slice()));
    }

    #[test]
    fn keys_turn_without_a_gap() {
        let (one, other) = (at(1, || 0), at(1, || 0));
        one.turn([2; 32]);
        assert!(one.open(&other.seal(b"old")).is_some(), "the key before still opens");
        assert!(other.open(&one.seal(b"new")).is_none(), "the other has not turned yet");
        other.turn([2; 32]);
        assert!(other.open(&one.seal(b"new")).is_some());
        one.turn([3; 32]);
        assert!(one.open(&at(1, || 0).seal(b"older")).is_none(), "two keys open, not three");
    }

    /// Changed in one place or several, cut, lengthened, put together of two: none of a million is opened.
    #[test]
    fn a_million_changed_datagrams_are_nothing() {
        const DATAGRAMS: u64 = 1_000_000;
        const THREADS: u64 = 4;
        std::thread::scope(|scope| {
            for seed in 0..THREADS {
                scope.spawn(move || changed_datagrams_are_nothing(seed, DATAGRAMS / THREADS));
            }
        });
    }

    fn changed_datagrams_are_nothing(seed: u64, count: u64) {
        let keyring = at(1, || 0);
        let good: Vec<Vec<u8>> =
            (0..16).map(|length| keyring.seal(&vec![length; usize::from(length) * 40])).collect();
        let mut state = seed;
        let mut below = |most: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).expect("31 bits") % most
        };
        for number in 0..count {
            let one = &good[below(good.len())];
            let mut datagram = one.clone();
            match number % 5 {
                0 => datagram.truncate(below(one.len())),
                1 => datagram.extend((0..=below(64)).map(|byte| byte.to_le_bytes()[0])),
                2 => {
                    let other = &good[below(good.len())];
                    let (cut, rest) = (below(one.len()), below(other.len()));
                    datagram.truncate(cut);
                    datagram.extend_from_slice(&other[rest..]);
                }
                _ => {
                    for _ in 0..=below(4) {
                        let place = below(datagram.len());
                        datagram[place] ^= 1 << below(8);
                    }
                }
            }
            let is_whole = good.contains(&datagram);
            assert!(keyring.open(&datagram).is_none() || is_whole, "number {number} was opened");
        }
    }

    proptest! {
        /// A datagram that was changed anywhere, or cut, is nothing.
        #[test]
        fn a_changed_datagram_is_nothing(
            message in prop::collection::vec(any::<u8>(), 0..200), place in any::<prop::sample::Index>(),
            change in 1_u8.., cut in any::<prop::sample::Index>(),
        ) {
            let keyring = at(1, || 0);
            let sealed = keyring.seal(&message);
            let mut changed = sealed.clone();
            changed[place.index(sealed.len())] ^= change;
            prop_assert_eq!(keyring.open(&changed), None);
            prop_assert_eq!(keyring.open(&sealed[..cut.index(sealed.len())]), None);
        }

        #[test]
        fn noise_is_nothing(noise in prop::collection::vec(any::<u8>(), 0..1500)) {
            prop_assert_eq!(at(1, || 0).open(&noise), None);
        }
    }
}
