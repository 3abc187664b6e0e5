//! Which layers of isolation this machine has, found out once at start by trying each on a real
//! process. An instance reports exactly the layers that hold for it.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::cgroup::{CONTROLLERS, Cgroups, Limits};
use crate::exec::Cage;

/// All layers, from the outermost on. `process_group` always holds.
pub const LAYERS: [&str; 10] = [
    "process_group",
    "death_signal",
    "rlimits",
    "no_new_privs",
    "uid",
    "landlock",
    "seccomp",
    "memory",
    "cpu",
    "pids",
];
/// The limits of the group that a controller is tried with.
const TRIED: Limits = Limits { memory_bytes: 64 << 20, cpu_millis: 1000, processes: 64 };

/// First of the users that instances run as; each instance has its own.
pub const FIRST_UID: u32 = 700_000;

/// What may be read by every process: programs, libraries and what they need to find names.
const READABLE: [&str; 26] = [
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    "/opt",
    "/proc",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/etc/ssl",
    "/etc/ca-certificates",
    "/etc/alternatives",
    "/etc/debian_version",
    "/etc/hosts",
    "/etc/lsb-release",
    "/etc/os-release",
    "/etc/pip.conf",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/sys/devices/system/cpu",
];

/// What may be written by every process.
const WRITABLE: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/full"];

/// The layers of this machine, and how to lock a process into them.
#[derive(Clone, Debug)]
pub struct Isolation {
    /// Layers that hold, in the order of [`LAYERS`].
    pub layers: Vec<String>,
    /// The groups of the layers `memory`, `cpu` and `pids`.
    pub cgroups: Option<Cgroups>,
    program: PathBuf,
}

impl Isolation {
    /// Tries each layer on a real process. `program` is this binary; `data` must be reachable for
    /// another user, or the layer `uid` is left out.
    /// `name` is the node's own among the control groups of this machine.
    pub fn probe(program: &Path, data: &Path, name: &str) -> Self {
        let cgroups = Cgroups::open(name);
        let layers = vec!["process_group".to_owned()];
        let mut this = Self { layers, cgroups, program: program.to_owned() };
        for layer in LAYERS[1..].iter().filter(|layer| !CONTROLLERS.contains(layer)) {
            let possible = match *layer {
                "uid" => rustix::process::geteuid().is_root() && is_reachable(data),
                _ => true,
            };
            if possible && this.holds(layer) {
                this.layers.push((*layer).to_owned());
            }
        }
        this.probe_groups();
        this
    }

    /// Controllers that do not take a process in are left out one by one.
    fn probe_groups(&mut self) {
        let Some(all) = self.cgroups.take() else { return };
        let mut held = all.clone();
        for controller in all.controllers() {
            let mut alone = all.clone();
            all.controllers()
                .iter()
                .filter(|one| **one != controller)
                .for_each(|one| alone.without(one));
            let tried = alone.create("probe", &TRIED);
            let holds = tried.as_ref().is_ok_and(|group| self.tries(&[], group.doors()));
            let _ = tried.map(|group| group.end());
            if holds {
                self.layers.push(controller.to_owned());
            } else {
                held.without(controller);
            }
        }
        self.cgroups = Some(held).filter(|held| !held.controllers().is_empty());
    }

    fn holds(&self, layer: &str) -> bool {
        self.tries(&[layer], vec![])
    }

    fn tries(&self, layers: &[&str], groups: Vec<PathBuf>) -> bool {
        let cage = Cage {
            command: vec!["true".to_owned()],
            folder: PathBuf::from("/"),
            layers: layers.iter().map(|layer| (*layer).to_owned()).collect(),
            uid: Some(FIRST_UID),
            readable: readable(&[]),
            writable: vec![],
            port: None,
            parent: std::process::id(),
            groups,
            processes: None,
            address_space: None,
        };
        let status = self.command(&cage).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    }

    /// A command that enters the cage; variables are set by [`set_variable`].
    pub fn command(&self, cage: &Cage) -> Command {
        let mut command = Command::new(&self.program);
        let cage = serde_json::to_string(cage).expect("a cage has only plain fields");
        command.arg("__exec").arg(cage).env_clear().stdin(Stdio::null());
        command
    }

    /// Whether this layer holds.
    pub fn has(&self, layer: &str) -> bool {
        self.layers.iter().any(|named| named == layer)
    }
}

/// Gives the caged process a variable.
pub fn set_variable(command: &mut Command, name: &str, value: impl AsRef<std::ffi::OsStr>) {
    command.env(format!("{}{name}", crate::exec::VARIABLE_PREFIX), value);
}

/// The common readable paths and some more.
pub fn readable(more: &[&Path]) -> Vec<PathBuf> {
    let common = READABLE.iter().map(PathBuf::from);
    common.chain(more.iter().map(|path| path.to_path_buf())).filter(|path| path.exists()).collect()
}

/// The common writable paths and some more.
pub fn writable(more: &[&Path]) -> Vec<PathBuf> {
    let common = WRITABLE.iter().map(PathBuf::from);
    common.chain(more.iter().map(|path| path.to_path_buf())).filter(|path| path.exists()).collect()
}

/// Whether any user may pass through every folder of this path.
pub fn is_reachable(path: &Path) -> bool {
    let Ok(path) = path.canonicalize() else { return false };
    path.ancestors().all(|folder| {
        std::fs::metadata(folder).is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0)
    })
}
