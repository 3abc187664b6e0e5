//! Sources of small agents, packed.

use std::{fs, io::Write as _, process::Command, sync::OnceLock};

/// Files by name.
pub type Files<'f> = [(&'f str, &'f str)];

/// Says what it was told.
pub const ECHO: &str =
    "def invoke(input, context):\n    return {'echo': input, 'version': context['version']}\n";

/// As `tar.gz`.
pub fn tar_gz(files: &Files<'_>) -> Vec<u8> {
    let files: Vec<_> = files.iter().map(|(name, text)| (*name, text.as_bytes())).collect();
    tar_gz_of(&files)
}

/// As `tar.gz`, of any bytes.
pub fn tar_gz_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let gz = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    tar(files, gz).finish().expect("packs")
}

/// As `tar.zst`.
pub fn tar_zst(files: &Files<'_>) -> Vec<u8> {
    let zst = zstd::Encoder::new(vec![], 1).expect("packs");
    let files: Vec<_> = files.iter().map(|(name, text)| (*name, text.as_bytes())).collect();
    tar(&files, zst).finish().expect("packs")
}

fn tar<W: std::io::Write>(files: &[(&str, &[u8])], out: W) -> W {
    let mut builder = tar::Builder::new(out);
    for (name, text) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        builder.append_data(&mut header, name, *text).expect("packs");
    }
    builder.into_inner().expect("packs")
}

/// As `zip`.
pub fn zip(files: &Files<'_>) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(vec![]));
    for (name, text) in files {
        zip.start_file(*name, zip::write::SimpleFileOptions::default()).expect("packs");
        zip.write_all(text.as_bytes()).expect("packs");
    }
    zip.finish().expect("packs").into_inner()
}

/// Answers every request with its port; keeps connections open. An input of
/// `{"probe": "what argument"}` makes it try something, which tells what its cage permits.
const COMPILED_ECHO: &str = r#"
use std::io::{BufRead, BufReader, Read, Write};

/// What a probe of the container says: `what argument`.
fn probed(input: &str) -> String {
    let (what, argument) = input.split_once(' ').unwrap_or((input, ""));
    match what {
        "env" => std::env::var(argument).unwrap_or_default(),
        "write" => format!("{:?}", std::fs::write(argument, "x").map_err(|e| e.kind())),
        "read" => std::fs::read_to_string(argument).unwrap_or_else(|e| e.to_string()),
        "connect" => {
            let address = argument.parse().expect("an address");
            let wait = std::time::Duration::from_secs(1);
            std::net::TcpStream::connect_timeout(&address, wait).is_ok().to_string()
        }
        "fork" => {
            let spawn = |_| std::thread::Builder::new().spawn(|| std::thread::park()).is_ok();
            (0..argument.parse().expect("a number")).filter(|n: &i32| spawn(*n)).count().to_string()
        }
        "eat" => {
            let bytes = argument.parse::<usize>().expect("a number") << 20;
            let held = vec![1_u8; bytes];
            std::hint::black_box(&held).len().to_string()
        }
        "say" => { println!("{argument}"); argument.to_owned() }
        "exit" => std::process::exit(argument.parse().expect("a number")),
        _ => std::env::var("PORT").unwrap(),
    }
}

/// `stream COUNT MILLISECONDS`: events that say when they were sent, in microseconds since 1970.
fn streamed(stream: &mut std::net::TcpStream, words: &str) {
    let numbers: Vec<u64> = words.split(' ').skip(1).map(|n| n.parse().unwrap()).collect();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    if stream.write_all(head.as_bytes()).is_err() { return; }
    for _ in 0..numbers[0] {
        std::thread::sleep(std::time::Duration::from_millis(numbers[1]));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let event = format!("data: {{\"type\":\"chunk\",\"content\":\"{}\"}}\n\n", now.as_micros());
        if stream.write_all(event.as_bytes()).is_err() { return; }
    }
    let _ = stream.write_all(b"data: {\"type\":\"done\"}\n\n");
}

fn main() {
    let port = std::env::var("PORT").unwrap();
    let host = std::env::var("ROOST_BIND").unwrap_or("127.0.0.1".into());
    if let Ok(mib) = std::env::var("EAT_AT_START") { probed(&format!("eat {mib}")); }
    let listener = std::net::TcpListener::bind(format!("{host}:{port}")).unwrap();
    for stream in listener.incoming() {
        let port = port.clone();
        std::thread::spawn(move || {
            let mut stream = stream.unwrap();
            stream.set_nodelay(true).unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            loop {
                let mut length = 0;
                let mut line = String::new();
                loop {
                    line.clear();
                    if reader.read_line(&mut line).unwrap_or(0) == 0 { return; }
                    if line == "\r\n" { break; }
                    let lower = line.to_ascii_lowercase();
                    if let Some(value) = lower.strip_prefix("content-length:") { length = value.trim().parse().unwrap(); }
                }
                let mut body = vec![0; length];
                if reader.read_exact(&mut body).is_err() { return; }
                let body = String::from_utf8_lossy(&body);
                let probe = body.split_once("\"probe\":\"").and_then(|(_, rest)| rest.split_once('"'));
                if let Some((words, _)) = probe && words.starts_with("stream ") {
                    return streamed(&mut stream, words);
                }
                let answer = match probe {
                    Some((probe, _)) => format!("{{\"output\":{:?}}}", probed(probe)),
                    None => format!("{{\"output\":{port}}}"),
                };
                let head = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", answer.len());
                if stream.write_all((head + &answer).as_bytes()).is_err() { return; }
            }
        });
    }
}
"#;

/// The echo server as a static program, compiled once.
pub fn echo_program() -> &'static [u8] {
    static PROGRAM: OnceLock<Vec<u8>> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let (source, binary) = (folder.path().join("echo.rs"), folder.path().join("echo"));
        fs::write(&source, COMPILED_ECHO).expect("written");
        let built = Command::new("rustc")
            .args([
                "--edition",
                "2024",
                "-O",
                "-C",
                "strip=symbols",
                "-C",
                "target-feature=+crt-static",
            ])
            .arg("-o")
            .arg(&binary)
            .arg(&source)
            .status();
        assert!(built.is_ok_and(|status| status.success()), "rustc builds the echo agent");
        fs::read(&binary).expect("it was built")
    })
}

/// An archive of the echo server and these files; it takes so many calls at once.
pub fn compiled_echo(concurrency: u32, files: &Files<'_>) -> Vec<u8> {
    let gz = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    let toml = format!(
        "entry = [\"echo\"]\nlanguage = \"binary\"\n[scaling]\nconcurrency = {concurrency}\n"
    );
    let mut builder = tar::Builder::new(gz);
    let texts = files.iter().map(|(name, text)| (*name, text.as_bytes(), 0o644));
    let own = [("echo", echo_program(), 0o755), ("agent.toml", toml.as_bytes(), 0o644)];
    for (name, bytes, mode) in own.into_iter().chain(texts) {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(mode);
        header.set_cksum();
        builder.append_data(&mut header, name, bytes).expect("packs");
    }
    builder.into_inner().expect("packs").finish().expect("packs")
}
