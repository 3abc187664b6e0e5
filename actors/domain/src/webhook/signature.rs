//! How a delivery is signed: the specification's own headers, and those of Standard Webhooks.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::hex::hex;

/// What secrets of Standard Webhooks begin with.
pub const SECRET_PREFIX: &str = "whsec_";

fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("any length of key fits");
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// `sha256=<hex>` over `timestamp.body`, keyed with the secret's own bytes (`interface`, Signature).
pub fn service(secret: &str, timestamp: u64, body: &[u8]) -> String {
    let digest = mac(secret.as_bytes(), &[timestamp.to_string().as_bytes(), b".", body]);
    format!("sha256={}", hex(&digest))
}

/// `v1,<base64>` over `id.timestamp.body` (Standard Webhooks). A `whsec_` secret is the base64 of its
/// key; any other one is the key itself.
pub fn standard(secret: &str, id: &str, timestamp: u64, body: &[u8]) -> String {
    let decoded = secret.strip_prefix(SECRET_PREFIX).and_then(|text| STANDARD.decode(text).ok());
    let key = decoded.as_deref().unwrap_or(secret.as_bytes());
    let timestamp = timestamp.to_string();
    let digest = mac(key, &[id.as_bytes(), b".", timestamp.as_bytes(), b".", body]);
    format!("v1,{}", STANDARD.encode(digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_those_of_other_implementations() {
        // printf '1700000000.{"a":1}' | openssl dgst -sha256 -hmac secret
        assert_eq!(
            service("secret", 1_700_000_000, br#"{"a":1}"#),
            "sha256=49f24e537407743fa4a0242bb63b94b9a47ee99cbbe071ccd8a22550ae411686"
        );
        // The example of the standard's own libraries.
        assert_eq!(
            standard(
                "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
                "msg_p5jXN8AQM9LWM0D4loKWxJek",
                1_614_265_330,
                br#"{"test": 2432232314}"#
            ),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        );
    }
}
