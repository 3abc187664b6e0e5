//! `roost`.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // The step between a node and an agent's process comes first: it must stay single-threaded.
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("__exec") => node::exec::main(&arguments.next().unwrap_or_default()),
        Some(api::hasher::ARGUMENT) => api::hasher::main(),
        _ => node::cli::main(),
    }
}
