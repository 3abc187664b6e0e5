//! Sources of small agents, packed.

use std::io::Write as _;

/// Files by name.
pub type Files<'f> = [(&'f str, &'f str)];

/// Says what it was told.
pub const ECHO: &str =
    "def invoke(input, context):\n    return {'echo': input, 'version': context['version']}\n";

/// As `tar.gz`.
pub fn tar_gz(files: &Files<'_>) -> Vec<u8> {
    let gz = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    tar(files, gz).finish().expect("packs")
}

/// As `tar.zst`.
pub fn tar_zst(files: &Files<'_>) -> Vec<u8> {
    let zst = zstd::Encoder::new(vec![], 1).expect("packs");
    tar(files, zst).finish().expect("packs")
}

fn tar<W: std::io::Write>(files: &Files<'_>, out: W) -> W {
    let mut builder = tar::Builder::new(out);
    for (name, text) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        builder.append_data(&mut header, name, text.as_bytes()).expect("packs");
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
