//! What the README tells receivers of webhooks to do is run as it stands there.

use std::{io::Write as _, process::Command};

use tests::{sha256, skipped};

fn block(language: &str, function: &str) -> String {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md"));
    let readme = readme.expect("README.md is in the repository");
    let fence = format!("```{language}\n");
    let mut blocks = readme.split(&fence).skip(1).filter_map(|rest| rest.split("```").next());
    let found = blocks.find(|code| code.contains(function));
    found.unwrap_or_else(|| panic!("no {language} block with {function}")).to_owned()
}

fn has(program: &str) -> bool {
    let is_there = Command::new(program).arg("--version").output().is_ok();
    if !is_there {
        skipped(program);
    }
    is_there
}

/// Runs a program on a file with this text; gives what it printed.
fn run(program: &str, name: &str, text: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    let mut file = std::fs::File::create(&path).expect("a file");
    file.write_all(text.as_bytes()).expect("it is written");
    let output = Command::new(program).arg(&path).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn the_python_receiver_takes_what_is_right_alone() {
    if !has("python3") {
        return;
    }
    let code = block("python", "def verify");
    let cases = "
body = b'{\"a\":1}'
now = str(int(time.time()))
def signed(at, secret='s3cret'):
    return 'sha256=' + hmac.new(secret.encode(), at.encode() + b'.' + body, hashlib.sha256).hexdigest()
def told(at, signature, content=body):
    return verify('s3cret', {'X-Service-Timestamp': at, 'X-Service-Signature': signature}, content)
old = str(int(time.time()) - 400)
print(told(now, signed(now)), told(now, signed(now, 'other')), told(now, signed(now), body + b' '), told(old, signed(old)))
";
    assert_eq!(run("python3", "r.py", &format!("{code}{cases}")), "True False False False");
}

#[test]
fn the_node_receiver_takes_what_is_right_alone() {
    if !has("node") {
        return;
    }
    let code = block("js", "export function verify");
    let cases = "
const body = '{\"a\":1}';
const now = String(Math.floor(Date.now() / 1000));
const signed = (at, secret = 's3cret') => 'sha256=' + createHmac('sha256', secret).update(`${at}.${body}`).digest('hex');
const told = (at, signature, content = body) =>
  verify('s3cret', { 'x-service-timestamp': at, 'x-service-signature': signature }, content);
const old = String(Number(now) - 400);
console.log(told(now, signed(now)), told(now, signed(now, 'other')), told(now, signed(now), body + ' '), told(old, signed(old)));
";
    assert_eq!(run("node", "r.mjs", &format!("{code}{cases}")), "true false false false");
}

#[test]
fn the_go_receiver_takes_what_is_right_alone() {
    if Command::new("go").arg("version").output().is_err() {
        return skipped("go");
    }
    let code = block("go", "func Verify");
    let head = "package main
import (
	\"crypto/hmac\"
	\"crypto/sha256\"
	\"encoding/hex\"
	\"fmt\"
	\"math\"
	\"net/http\"
	\"strconv\"
	\"time\"
)
";
    let cases = "
func main() {
	body := []byte(`{\"a\":1}`)
	signed := func(at, secret string) string {
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write([]byte(at + \".\"))
		mac.Write(body)
		return \"sha256=\" + hex.EncodeToString(mac.Sum(nil))
	}
	told := func(at, signature string, content []byte) bool {
		h := http.Header{}
		h.Set(\"X-Service-Timestamp\", at)
		h.Set(\"X-Service-Signature\", signature)
		return Verify(\"s3cret\", h, content)
	}
	now := strconv.FormatInt(time.Now().Unix(), 10)
	old := strconv.FormatInt(time.Now().Unix()-400, 10)
	fmt.Println(told(now, signed(now, \"s3cret\"), body), told(now, signed(now, \"other\"), body),
		told(now, signed(now, \"s3cret\"), append(body, ' ')), told(old, signed(old, \"s3cret\"), body))
}
";
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("receiver.go");
    std::fs::write(&path, format!("{head}{code}{cases}")).expect("it is written");
    let mut command = Command::new("go");
    command.arg("run").arg(&path).env("GOCACHE", folder.path().join("cache"));
    let output = command.env("GOFLAGS", "-mod=mod").output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert_eq!(told, "true false false false");
}

mod rust_receiver {
    //! The README's own lines; the story compares them.

    use hmac::{Hmac, KeyInit as _, Mac as _};
    use sha2::Sha256;

    #[rustfmt::skip]
    pub(super) fn verify(secret: &str, timestamp: &str, signature: &str, body: &[u8], now: u64) -> bool {
        let Ok(at) = timestamp.parse::<u64>() else { return false };
        let Some(hex) = signature.strip_prefix("sha256=") else { return false };
        let given: Option<Vec<u8>> =
            (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(hex.get(i..i + 2)?, 16).ok()).collect();
        let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("any length of key fits");
        mac.update(timestamp.as_bytes());
        mac.update(b".");
        mac.update(body);
        now.abs_diff(at) <= 300 && given.is_some_and(|given| mac.verify_slice(&given).is_ok())
    }
}

#[test]
fn the_rust_receiver_takes_what_is_right_alone() {
    let own = include_str!("receivers.rs");
    let words =
        |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
    let shown = words(block("rust", "fn verify").trim_start_matches("fn verify"));
    assert!(words(own).contains(&shown), "README and story differ");
    let (body, now) = (b"{\"a\":1}".as_slice(), 1_700_000_000);
    let right = domain_signature("s3cret", now, body);
    let told = |signature: &str, body: &[u8], at: u64| {
        rust_receiver::verify("s3cret", &now.to_string(), signature, body, at)
    };
    assert!(told(&right, body, now + 300));
    assert!(!told(&right, body, now + 301), "too old");
    assert!(!told(&right, b"{\"a\":2}", now), "another body");
    assert!(!told(&domain_signature("other", now, body), body, now), "another secret");
    for wrong in ["", "sha256=", "sha256=zz", "sha256=abc", "md5=00"] {
        assert!(!told(wrong, body, now), "{wrong}");
    }
    assert_eq!(sha256(b"").len(), 32);
}

/// HMAC-SHA-256 by hand (RFC 2104), so that the story leans on nothing it tests.
fn domain_signature(secret: &str, timestamp: u64, body: &[u8]) -> String {
    let pad = |with: u8| -> Vec<u8> {
        let mut key = [0_u8; 64];
        key[..secret.len()].copy_from_slice(secret.as_bytes());
        key.iter().map(|byte| byte ^ with).collect()
    };
    let message = [timestamp.to_string().as_bytes(), b".", body].concat();
    let inner = sha256(&[pad(0x36), message].concat());
    let digest = sha256(&[pad(0x5c), inner.to_vec()].concat());
    format!("sha256={}", digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}
