//! `roost`.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // The step between a node and an agent's process comes first: it must stay single-threaded.
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("__exec") {
        return node::exec::main(&arguments.next().unwrap_or_default());
    }
    node::cli::main()
}
