//! Control groups: the limits of memory, processor and processes of an instance as a whole, whatever
//! it starts and wherever that hides. Version 2 (kernel document `cgroup-v2`) where it has the
//! controllers, else version 1, else none.
//!
//! A controller that can't be written to, or does not take a process in, is left out, and the layer
//! of its name does not hold.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

/// Where control groups are.
const ROOT: &str = "/sys/fs/cgroup";
/// The controllers used; each is a layer of isolation.
pub const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// Counts processor time where version 1 keeps that apart; no layer.
const COUNTER: &str = "cpuacct";
/// The period of processor time, in microseconds.
const PERIOD_US: u64 = 100_000;
/// How often the last process of a group is looked for before it is given up.
const EMPTY_TRIES: u32 = 200;
/// Between those looks.
const EMPTY_LOOK: Duration = Duration::from_millis(5);

/// What an instance may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes held in memory.
    pub memory_bytes: u64,
    /// Thousandths of a core.
    pub cpu_millis: u64,
    /// Processes and threads.
    pub processes: u64,
}

/// How this machine's groups are spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    V1,
    V2,
}

/// The groups of a node.
#[derive(Clone, Debug)]
pub struct Cgroups {
    kind: Kind,
    /// For each controller, the folder that holds the instances' groups. Version 2 has one for all.
    bases: Vec<(&'static str, PathBuf)>,
}

impl Cgroups {
    /// Finds what can be written to. `name` is this node's own; groups that an earlier life left
    /// under it are ended.
    pub fn open(name: &str) -> Option<Self> {
        let found = Self::v2(name).or_else(|| Self::v1(name))?;
        for (_, base) in &found.bases {
            for left in folders(base) {
                end(&left, found.kind);
            }
        }
        Some(found)
    }

    fn v2(name: &str) -> Option<Self> {
        let own = own_group("")?;
        let root = Path::new(ROOT);
        let here = root.join(own.trim_start_matches('/'));
        let offered = fs::read_to_string(here.join("cgroup.controllers")).ok()?;
        let has = |controller: &&&str| offered.split_whitespace().any(|one| one == **controller);
        let wanted: Vec<&'static str> = CONTROLLERS.iter().filter(has).copied().collect();
        if wanted.is_empty() {
            return None;
        }
        let (aside, base) = (here.join(format!("{name}-node")), here.join(name));
        let moved = here != root;
        if shared_out(&here, &base, moved.then_some(&aside), &wanted).is_err() {
            // Somebody else is in this group: as before, and without limits.
            let _ = fs::write(here.join("cgroup.procs"), std::process::id().to_string());
            let _ = fs::remove_dir(&aside);
            let _ = fs::remove_dir(&base);
            return None;
        }
        let bases = wanted.into_iter().map(|controller| (controller, base.clone())).collect();
        Some(Self { kind: Kind::V2, bases })
    }

    fn v1(name: &str) -> Option<Self> {
        let mut bases = vec![];
        for controller in CONTROLLERS.into_iter().chain([COUNTER]) {
            let Some(own) = own_group(controller) else { continue };
            let mounted = [controller, "cpu,cpuacct"].map(|folder| Path::new(ROOT).join(folder));
            let is_it = |folder: &&PathBuf| {
                folder.join("cgroup.procs").exists()
                    && (folder.ends_with(controller) || controller.starts_with("cpu"))
            };
            let Some(mounted) = mounted.iter().find(is_it) else { continue };
            let base = mounted.join(own.trim_start_matches('/')).join(name);
            if fs::create_dir_all(&base).is_ok() {
                bases.push((controller, base));
            }
        }
        bases.iter().any(|(name, _)| *name != COUNTER).then_some(Self { kind: Kind::V1, bases })
    }

    /// Leaves a controller out.
    pub fn without(&mut self, controller: &str) {
        self.bases.retain(|(name, _)| *name != controller);
    }

    /// The controllers in use that are layers.
    pub fn controllers(&self) -> Vec<&'static str> {
        self.bases.iter().map(|(name, _)| *name).filter(|name| *name != COUNTER).collect()
    }

    /// Makes a group with these limits.
    pub fn create(&self, name: &str, limits: &Limits) -> io::Result<Group> {
        let mut folders = vec![];
        for (controller, base) in &self.bases {
            let folder = base.join(name);
            fs::create_dir_all(&folder)?;
            match self.kind {
                Kind::V1 => limit_v1(&folder, controller, limits)?,
                Kind::V2 => limit_v2(&folder, controller, limits)?,
            }
            if !folders.contains(&folder) {
                folders.push(folder);
            }
        }
        Ok(Group { kind: self.kind, folders })
    }

    /// Removes the node's own folders, which are empty by then.
    pub fn close(&self) {
        for (_, base) in &self.bases {
            let _ = fs::remove_dir(base);
        }
    }
}

/// Makes a folder for the instances' groups. A group with processes of its own can't share out what
/// it has, so that this node moves aside where it has to.
fn shared_out(
    here: &Path,
    base: &Path,
    aside: Option<&PathBuf>,
    controllers: &[&str],
) -> io::Result<()> {
    if let Some(aside) = aside {
        fs::create_dir_all(aside)?;
        fs::write(aside.join("cgroup.procs"), std::process::id().to_string())?;
    }
    fs::create_dir_all(base)?;
    for folder in [here, base] {
        for controller in controllers {
            fs::write(folder.join("cgroup.subtree_control"), format!("+{controller}"))?;
        }
    }
    Ok(())
}

fn limit_v1(folder: &Path, controller: &str, limits: &Limits) -> io::Result<()> {
    let set = |file: &str, value: u64| fs::write(folder.join(file), value.to_string());
    match controller {
        "memory" => {
            set("memory.limit_in_bytes", limits.memory_bytes)?;
            // Only where the kernel counts swap; elsewhere there is none to hide in.
            let _ = set("memory.memsw.limit_in_bytes", limits.memory_bytes);
            Ok(())
        }
        "cpu" => {
            set("cpu.cfs_period_us", PERIOD_US)?;
            set("cpu.cfs_quota_us", limits.cpu_millis * PERIOD_US / 1000)
        }
        "pids" => set("pids.max", limits.processes),
        _ => Ok(()),
    }
}

fn limit_v2(folder: &Path, controller: &str, limits: &Limits) -> io::Result<()> {
    match controller {
        "memory" => {
            fs::write(folder.join("memory.max"), limits.memory_bytes.to_string())?;
            let _ = fs::write(folder.join("memory.swap.max"), "0");
            Ok(())
        }
        "cpu" => {
            let quota = limits.cpu_millis * PERIOD_US / 1000;
            fs::write(folder.join("cpu.max"), format!("{quota} {PERIOD_US}"))
        }
        _ => fs::write(folder.join("pids.max"), limits.processes.to_string()),
    }
}

/// The group of this process: `""` for version 2, else of a controller (cgroups(7)).
fn own_group(controller: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (names, path) = (parts.next()?, parts.next()?);
        names.split(',').any(|name| name == controller).then(|| path.to_owned())
    })
}

fn folders(base: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// Ends every process of a group and removes it.
fn end(folder: &Path, kind: Kind) {
    for _ in 0..EMPTY_TRIES {
        if kind == Kind::V2 {
            let _ = fs::write(folder.join("cgroup.kill"), "1");
        }
        let processes = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        let pids = processes.lines().filter_map(|line| line.parse().ok());
        for pid in pids.filter_map(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        match fs::remove_dir(folder) {
            Ok(()) => return,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(_) => std::thread::sleep(EMPTY_LOOK),
        }
    }
    tracing::warn!(group = %folder.display(), "a control group could not be emptied");
}

/// The group of one instance.
#[derive(Clone, Debug)]
pub struct Group {
    kind: Kind,
    folders: Vec<PathBuf>,
}

impl Group {
    /// The files that take a process in.
    pub fn doors(&self) -> Vec<PathBuf> {
        self.folders.iter().map(|folder| folder.join("cgroup.procs")).collect()
    }

    fn read(&self, file: &str) -> Option<String> {
        self.folders.iter().find_map(|folder| fs::read_to_string(folder.join(file)).ok())
    }

    fn field(&self, file: &str, name: &str) -> Option<u64> {
        let text = self.read(file)?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line?.trim().parse().ok()
    }

    /// Whether a process of it was ended for its use of memory.
    pub fn ran_out_of_memory(&self) -> bool {
        let file = match self.kind {
            Kind::V1 => "memory.oom_control",
            Kind::V2 => "memory.events",
        };
        self.field(file, "oom_kill").is_some_and(|times| times > 0)
    }

    /// Bytes held in memory, without what the kernel only remembers of files.
    pub fn memory_bytes(&self) -> Option<u64> {
        let name = match self.kind {
            Kind::V1 => "total_rss",
            Kind::V2 => "anon",
        };
        self.field("memory.stat", name)
    }

    /// Processor time so far, in milliseconds.
    pub fn cpu_millis(&self) -> Option<u64> {
        match self.kind {
            Kind::V1 => Some(self.read("cpuacct.usage")?.trim().parse::<u64>().ok()? / 1_000_000),
            Kind::V2 => Some(self.field("cpu.stat", "usage_usec")? / 1000),
        }
    }

    /// Who is in it.
    pub fn processes(&self) -> Vec<i32> {
        let text = self.read("cgroup.procs").unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Ends whatever is in it and removes it.
    pub fn end(&self) {
        self.folders.iter().for_each(|folder| end(folder, self.kind));
    }
}
