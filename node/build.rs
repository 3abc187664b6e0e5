//! Builds the small static program that containers are entered by, to be embedded in `roost`.

use std::{env, fs, path::Path, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=helper/enter.rs");
    let out = env::var("OUT_DIR").expect("cargo sets it");
    let target = env::var("TARGET").expect("cargo sets it");
    let rustc = env::var("RUSTC").expect("cargo sets it");
    let helper = Path::new(&out).join("enter");
    let built = Command::new(rustc)
        .args([
            "--edition",
            "2024",
            "--crate-name",
            "enter",
            "-C",
            "opt-level=s",
            "-C",
            "panic=abort",
        ])
        .args(["-C", "strip=symbols", "-C", "target-feature=+crt-static", "--target", &target])
        .arg("-o")
        .arg(&helper)
        .arg("helper/enter.rs")
        .status();
    if !built.is_ok_and(|status| status.success()) {
        // Everything but containers works without it, and the node says so.
        println!(
            "cargo::warning=the static helper for containers could not be built; docker clouds will be refused"
        );
        fs::write(&helper, []).expect("the output folder can be written to");
    }
}
