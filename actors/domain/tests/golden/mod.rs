//! What a release has written must be readable for ever.

use std::{env, fs, path::Path};

use domain::codec::{self, DecodeError};
use serde::de::DeserializeOwned;

/// Reads bytes as what they were written as.
pub(crate) type Read = fn(&[u8]) -> Result<(), DecodeError>;

/// The reader of a type.
pub(crate) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<(), DecodeError> {
    codec::decode::<T>(bytes).map(drop)
}

/// Reads every line of a file of `tests/golden`. `ROOST_BLESS=1` writes the file of a new release.
pub(crate) fn hold(file: &str, written: &[(&str, Vec<u8>, Read)]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
    if env::var_os("ROOST_BLESS").is_some() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let lines: String =
            written.iter().map(|(name, bytes, _)| format!("{name}: {}\n", hex(bytes))).collect();
        fs::write(&path, lines).expect("written");
    }
    let golden = fs::read_to_string(path).expect("the file is in the repository");
    let mut names = vec![];
    for line in golden.lines() {
        let (name, hex) = line.split_once(": ").expect("a name and its bytes");
        let byte =
            |place: usize| u8::from_str_radix(&hex[place..place + 2], 16).expect("hexadecimal");
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        let (.., read) = written.iter().find(|row| row.0 == name).expect("a known name");
        assert!(read(&bytes).is_ok(), "{name} is not readable any more");
        assert!(read(&[2, 0x80]).is_err(), "a later format is not guessed at");
        assert!(read(&[]).is_err());
        names.push(name);
    }
    let known: Vec<&str> = written.iter().map(|row| row.0).collect();
    assert_eq!(names, known, "everything that is written has its line");
}
