//! Writes `openapi/openapi.json`: run it as `cargo spec`.

use std::{fs, io, path::Path};

fn main() -> io::Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi.json");
    fs::write(path, api::document())
}
