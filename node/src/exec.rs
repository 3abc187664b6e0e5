//! `roost __exec`: the step between this node and an agent's process. It locks itself in and then
//! becomes the process, so that no unsafe code is needed between `fork` and `exec`.
//!
//! It reads a [`Cage`] as JSON from its first argument. A layer that the cage names and that does
//! not hold ends the step: an instance is never weaker than it says.

use std::{
    collections::BTreeMap,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, bail};
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, NetPort, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::{
    process::{Resource, Rlimit, Signal, setrlimit, setsid},
    thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule};
use serde::{Deserialize, Serialize};

/// Most open files of an instance.
const FILES_MAX: u64 = 4096;
/// Most bytes of one file it writes.
const FILE_BYTES_MAX: u64 = 1024 * 1024 * 1024;

/// How a process is locked in.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cage {
    /// The command line.
    pub command: Vec<String>,
    /// Where it runs.
    pub folder: PathBuf,
    /// Layers that must hold, of [`crate::adapters::isolation::LAYERS`].
    pub layers: Vec<String>,
    /// The user to become, if the layer `uid` holds.
    pub uid: Option<u32>,
    /// Paths that may be read.
    pub readable: Vec<PathBuf>,
    /// Paths that may be written.
    pub writable: Vec<PathBuf>,
    /// The one port it may listen on; `None` is none.
    pub port: Option<u16>,
    /// The process that starts it: without it, nothing may run.
    pub parent: u32,
    /// Files of control groups that take the process in.
    #[serde(default)]
    pub groups: Vec<PathBuf>,
    /// Most processes and threads, where the process has a user of its own.
    pub processes: Option<u64>,
    /// Most bytes of address space, where no cgroup limits memory.
    pub address_space: Option<u64>,
}

/// Becomes the caged process, or says why not.
pub fn main(argument: &str) -> ExitCode {
    match enter(argument) {
        Ok(never) => match never {},
        Err(error) => {
            use std::io::Write as _;
            let _ =
                writeln!(std::io::stderr(), "roost: the process could not be started: {error:#}");
            ExitCode::from(126)
        }
    }
}

fn enter(argument: &str) -> anyhow::Result<std::convert::Infallible> {
    let cage: Cage = serde_json::from_str(argument)?;
    let holds = |layer: &str| cage.layers.iter().any(|named| named == layer);
    // A session may exist already when a supervisor made one.
    let _ = setsid();
    for group in &cage.groups {
        // Zero is the one who writes (cgroups(7)); what it starts stays inside.
        std::fs::write(group, "0").with_context(|| format!("{}", group.display()))?;
    }
    if holds("rlimits") {
        limit(&cage).context("rlimits")?;
    }
    if let Some(uid) = cage.uid.filter(|_| holds("uid")) {
        if let Some(most) = cage.processes {
            let most = Rlimit { current: Some(most), maximum: Some(most) };
            setrlimit(Resource::Nproc, most).context("processes")?;
        }
        become_user(uid).context("uid")?;
    }
    if holds("death_signal") {
        // Cleared by a change of user, so it comes after it.
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // A parent that ended before that sends no signal any more.
        let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
        if u32::try_from(parent)? != cage.parent {
            bail!("the node has ended");
        }
    }
    if holds("no_new_privs") {
        rustix::thread::set_no_new_privs(true)?;
    }
    if holds("landlock") {
        wall_in(&cage).context("landlock")?;
    }
    let variables = own_variables();
    let (program, arguments) = cage.command.split_first().context("the command is empty")?;
    let mut command = Command::new(program);
    command.args(arguments).current_dir(&cage.folder).env_clear().envs(variables);
    if holds("seccomp") {
        let filter = seccomp_filter()?;
        seccompiler::apply_filter(&filter).context("seccomp")?;
    }
    Err(anyhow::Error::new(command.exec()).context(format!("could not run {program}")))
}

/// What stands before the name of every variable that is meant for the caged process. Until it runs
/// none of them has its own name: a tenant's `LD_PRELOAD` must not reach this step, which begins as
/// the node's user.
pub const VARIABLE_PREFIX: &str = "CAGED_";

fn own_variables() -> Vec<(std::ffi::OsString, std::ffi::OsString)> {
    use std::os::unix::ffi::OsStrExt as _;
    std::env::vars_os()
        .filter_map(|(name, value)| {
            let own = name.as_bytes().strip_prefix(VARIABLE_PREFIX.as_bytes())?;
            Some((std::ffi::OsStr::from_bytes(own).to_owned(), value))
        })
        .collect()
}

fn limit(cage: &Cage) -> anyhow::Result<()> {
    let hard = |most| Rlimit { current: Some(most), maximum: Some(most) };
    let files = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(FILES_MAX);
    setrlimit(Resource::Nofile, hard(files.min(FILES_MAX)))?;
    setrlimit(Resource::Core, hard(0))?;
    setrlimit(Resource::Fsize, hard(FILE_BYTES_MAX))?;
    if let Some(bytes) = cage.address_space {
        setrlimit(Resource::As, hard(bytes))?;
    }
    Ok(())
}

fn become_user(uid: u32) -> anyhow::Result<()> {
    let (gid, uid) = (Gid::from_raw(uid), Uid::from_raw(uid));
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

fn wall_in(cage: &Cage) -> anyhow::Result<()> {
    let abi = ABI::V6;
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::AbstractUnixSocket)?
        .scope(Scope::Signal)?;
    let port = cage
        .port
        .map(|port| Ok::<_, landlock::RulesetError>(NetPort::new(port, AccessNet::BindTcp)));
    let status = ruleset
        .create()?
        .add_rules(path_beneath_rules(&cage.readable, AccessFs::from_read(abi)))?
        .add_rules(path_beneath_rules(&cage.writable, AccessFs::from_all(abi)))?
        .add_rules(port)?
        .restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        bail!("the kernel does not enforce it");
    }
    Ok(())
}

/// System calls that no agent needs and that widen what a hole in the kernel could reach.
const DENIED: [libc::c_long; 40] = [
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapon,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

fn seccomp_filter() -> anyhow::Result<BpfProgram> {
    let rules: BTreeMap<i64, Vec<SeccompRule>> =
        DENIED.iter().map(|call| (*call, vec![])).collect();
    let denied = SeccompAction::Errno(u32::try_from(libc::EPERM)?);
    let arch = std::env::consts::ARCH.try_into().context("an architecture without seccomp")?;
    Ok(SeccompFilter::new(rules, SeccompAction::Allow, denied, arch)?.try_into()?)
}
