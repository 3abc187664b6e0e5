//! The Docker engine of this machine, and what the tests need in it: base images made of this
//! machine's own interpreters, so that nothing is downloaded, and a private registry.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::OnceLock,
    time::Duration,
};

use tempfile::TempDir;

/// The image that Python sources are built on.
pub const PYTHON: &str = "roost-test-python:1";
/// The image that Node sources are built on.
pub const NODE: &str = "roost-test-node:1";

/// Whether an engine answers.
pub fn answers() -> bool {
    static ANSWERS: OnceLock<bool> = OnceLock::new();
    *ANSWERS.get_or_init(|| docker(&["version"]).status.success())
}

/// Runs the engine's own client.
pub fn docker(words: &[&str]) -> Output {
    let output = Command::new("docker").args(words).stdin(Stdio::null()).output();
    output.unwrap_or_else(|_| Output {
        status: std::os::unix::process::ExitStatusExt::from_raw(1 << 8),
        stdout: vec![],
        stderr: b"there is no docker client".to_vec(),
    })
}

/// What the client says; it must succeed.
pub fn told(words: &[&str]) -> String {
    let output = docker(words);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "docker {words:?}: {error}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// The names of the containers that run this agent.
pub fn containers_of(agent: &str) -> Vec<String> {
    let filter = format!("label=roost.agent={agent}");
    let names = told(&["ps", "--all", "--filter", &filter, "--format", "{{.Names}}"]);
    names.lines().map(str::to_owned).collect()
}

/// Copies a program with the libraries it is linked to, and imports the folder as an image.
const COMMON: &str = r#"
set -eu
root=$(mktemp -d); trap 'rm -rf "$root"' EXIT
mkdir -p "$root/usr/bin" "$root/usr/lib" "$root/tmp" "$root/etc" "$root/proc"
libraries() {
  ldd "$1" 2>/dev/null | grep -o '/[^ ]*' | while read -r file; do
    [ -e "$root$file" ] || { mkdir -p "$root$(dirname "$file")"; cp -L "$file" "$root$file"; }
  done
}
finish() {
  find "$root" -name __pycache__ -prune -exec rm -rf {} +
  tar -C "$root" -c . | docker import -c 'ENV PATH=/usr/bin' - "$1" >/dev/null
}
"#;

const PYTHON_BASE: &str = r#"
version=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
cp "$(readlink -f /usr/bin/python3)" "$root/usr/bin/python3"; libraries "$root/usr/bin/python3"
mkdir -p "$root/usr/lib/python$version" "$root/usr/lib/python3/dist-packages"
tar -C "/usr/lib/python$version" --exclude=test --exclude=idlelib --exclude=lib2to3 --exclude=tkinter -c . \
  | tar -C "$root/usr/lib/python$version" -x
for part in pip setuptools wheel pkg_resources _distutils_hack; do
  [ ! -e "/usr/lib/python3/dist-packages/$part" ] || cp -a "/usr/lib/python3/dist-packages/$part" "$root/usr/lib/python3/dist-packages/"
done
for file in "$root/usr/lib/python$version/lib-dynload/"*.so; do libraries "$file"; done
finish roost-test-python:1
"#;

const NODE_BASE: &str = r#"
node=$(readlink -f "$(command -v node)")
cp "$node" "$root/usr/bin/node"; libraries "$node"
finish roost-test-node:1
"#;

/// What a node itself needs: a shell for the steps of its Dockerfile, and the libraries of the program.
const HOST_BASE: &str = r#"
mkdir -p "$root/bin" "$root/var/lib"
cp "$(readlink -f /bin/sh)" "$root/bin/sh"; libraries "$root/bin/sh"; libraries "$ROOST"
version=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
cp "$(readlink -f /usr/bin/python3)" "$root/usr/bin/python3"; libraries "$root/usr/bin/python3"
mkdir -p "$root/usr/lib/python$version"
tar -C "/usr/lib/python$version" --exclude=test --exclude=idlelib --exclude=lib2to3 --exclude=tkinter -c . \
  | tar -C "$root/usr/lib/python$version" -x
for file in "$root/usr/lib/python$version/lib-dynload/"*.so; do libraries "$file"; done
cp /bin/cat "$root/usr/bin/cat"; libraries "$root/usr/bin/cat"
finish roost-test-host:1
"#;

/// An image of a node, made by the project's own Dockerfile on a base of this machine.
pub fn node_image(program: &Path) -> &'static str {
    const IMAGE: &str = "roost-test-node-image:1";
    base("roost-test-host:1", HOST_BASE);
    let context = tempfile::tempdir().expect("a folder");
    let copied = context.path().join("roost");
    let stripped = Command::new("strip").arg("-o").arg(&copied).arg(program).status();
    if !stripped.is_ok_and(|status| status.success()) {
        fs::copy(program, &copied).expect("copied");
    }
    let dockerfile = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/Dockerfile");
    let (dockerfile, context) =
        (dockerfile.display().to_string(), context.path().display().to_string());
    let arguments = ["--build-arg", "BASE_IMAGE=roost-test-host:1", "--build-arg", "PACKAGES="];
    let build = [&["build", "-t", IMAGE, "-f", &dockerfile][..], &arguments, &[&context]].concat();
    told(&build);
    IMAGE
}

fn base(name: &str, script: &str) {
    if docker(&["image", "inspect", name]).status.success() {
        return;
    }
    let mut bash = Command::new("bash");
    bash.env("ROOST", crate::node::binary());
    let made = bash.arg("-c").arg(format!("{COMMON}{script}")).output();
    let made = made.expect("bash runs");
    assert!(made.status.success(), "{name}: {}", String::from_utf8_lossy(&made.stderr));
}

/// Makes the base images, once.
pub fn bases() {
    static MADE: OnceLock<()> = OnceLock::new();
    MADE.get_or_init(|| {
        base(PYTHON, PYTHON_BASE);
        base(NODE, NODE_BASE);
    });
}

/// Debian's `docker-registry` with one user; it ends with its value.
pub struct Registry {
    child: Child,
    /// Where it listens.
    pub address: String,
    _folder: TempDir,
}

/// The one user of a [`Registry`]; the password's base64 has a `+` and a `/`, which clients get wrong.
pub const LOGIN: (&str, &str) = ("robot", "p?>~?>~ÿ?>");

impl Registry {
    /// With one user; `None` where the program is missing.
    pub fn start() -> Option<Self> {
        Self::with(true)
    }

    /// For everybody; `None` where the program is missing.
    pub fn open() -> Option<Self> {
        Self::with(false)
    }

    fn with(password: bool) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a folder");
        let passwords = Command::new("htpasswd").args(["-Bbn", LOGIN.0, LOGIN.1]).output().ok()?;
        fs::write(folder.path().join("htpasswd"), passwords.stdout).expect("written");
        let port = TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr());
        let address = format!("127.0.0.1:{}", port.expect("a free port").port());
        let config = Self::config(folder.path(), &address, password);
        fs::write(folder.path().join("config.yml"), config).expect("written");
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(folder.path().join("config.yml"));
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
        for _ in 0..200 {
            if std::net::TcpStream::connect(&address).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(Self { child, address, _folder: folder })
    }

    fn config(folder: &Path, address: &str, password: bool) -> String {
        let folder = folder.display();
        let auth = format!("auth:\n  htpasswd:\n    realm: roost\n    path: {folder}/htpasswd\n");
        format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {folder}/data\n\
             http:\n  addr: {address}\n{}",
            if password { auth } else { String::new() }
        )
    }

    /// Pushes an image of the engine, and takes it away there; gives its reference.
    pub fn push(&self, image: &str, name: &str) -> String {
        let reference = format!("{}/{name}", self.address);
        let login = tempfile::tempdir().expect("a folder");
        let config = login.path().to_string_lossy().into_owned();
        told(&["tag", image, &reference]);
        told(&["--config", &config, "login", "-u", LOGIN.0, "-p", LOGIN.1, &self.address]);
        told(&["--config", &config, "push", &reference]);
        told(&["rmi", &reference]);
        reference
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
