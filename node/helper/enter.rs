//! The first program of a container. It reads the agent's variables from a mounted file, so that the
//! engine's own record of the container never holds a value, and becomes the image's own command.
//!
//! Usage: `enter FILE PROGRAM [ARGUMENT…]`; the file holds `NAME=value` entries, each ended by a zero byte.

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::{ffi::OsStrExt, process::CommandExt},
    process::{Command, ExitCode},
};

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let (Some(file), Some(program)) = (words.next(), words.next()) else {
        eprintln!("usage: enter FILE PROGRAM [ARGUMENT...]");
        return ExitCode::from(2);
    };
    let variables = match fs::read(&file) {
        Ok(bytes) => variables(&bytes),
        Err(error) => {
            eprintln!("the agent's variables could not be read: {error}");
            return ExitCode::from(126);
        }
    };
    let error = Command::new(&program).args(words).envs(variables).exec();
    eprintln!("{} could not be started: {error}", program.to_string_lossy());
    ExitCode::from(127)
}

fn variables(bytes: &[u8]) -> Vec<(OsString, OsString)> {
    let text = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
    let entries = bytes.split(|byte| *byte == 0).filter(|entry| !entry.is_empty());
    entries
        .filter_map(|entry| {
            let middle = entry.iter().position(|byte| *byte == b'=')?;
            Some((text(&entry[..middle]), text(&entry[middle + 1..])))
        })
        .collect()
}
