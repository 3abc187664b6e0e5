//! A node as its operator has it: `roost dev --json` in a process of its own.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use serde_json::Value;
use tempfile::TempDir;

use crate::Customer;

/// Settings that make time short.
pub(crate) const QUICK: [(&str, &str); 6] = [
    ("ROOST_DEPLOY__MIN_HEALTHY", "300ms"),
    ("ROOST_HEALTH__INTERVAL", "500ms"),
    ("ROOST_RUNTIME__KILL_AFTER", "1s"),
    ("ROOST_INVOKE__READY_WAIT", "20s"),
    ("ROOST_INVOKE__CANCEL_WAIT", "1s"),
    ("ROOST_DEPLOY__DRAIN_TIMEOUT", "10s"),
];

/// A running node; it ends with its value.
pub struct Node {
    child: Child,
    /// Its folder.
    pub data: Arc<TempDir>,
    /// Where it is reached.
    pub base_url: String,
    settings: Vec<(String, String)>,
    live_key: String,
    test_key: String,
    /// The owner's address.
    pub email: String,
    /// The owner's password.
    pub password: String,
}

pub(crate) fn binary() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let folder = test.parent().and_then(Path::parent).expect("target/<profile>/deps");
    let binary = folder.join("roost");
    assert!(binary.exists(), "{} is missing: run `cargo build` first", binary.display());
    binary
}

fn spawn(data: &Path, settings: &[(String, String)], says: Stdio) -> (Child, Value) {
    let mut command = Command::new(binary());
    command.stderr(says);
    command.args(["dev", "--json", "--port", "0", "--data"]).arg(data);
    command.envs(settings.iter().map(|(k, v)| (k, v)));
    command.stdout(Stdio::piped()).stdin(Stdio::null());
    let mut child = command.spawn().expect("the node starts");
    let ready = crate::cluster::first_line(&mut child);
    (child, ready)
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

impl Node {
    /// A fresh node with short times.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A fresh node with short times below this folder.
    pub fn on(folder: &Path) -> Self {
        Self::make(tempfile::tempdir_in(folder).expect("a temporary folder"), &[])
    }

    /// A fresh node with short times and these settings.
    pub fn with(settings: &[(&str, &str)]) -> Self {
        Self::make(tempfile::tempdir().expect("a temporary folder"), settings)
    }

    /// A fresh node with these settings; what it says goes into a file.
    pub fn saying_into(file: std::fs::File, settings: &[(&str, &str)]) -> Self {
        let data = tempfile::tempdir().expect("a temporary folder");
        Self::speaking(data, settings, file.into())
    }

    fn make(data: TempDir, settings: &[(&str, &str)]) -> Self {
        Self::speaking(data, settings, Stdio::inherit())
    }

    fn speaking(data: TempDir, settings: &[(&str, &str)], says: Stdio) -> Self {
        let settings: Vec<_> = QUICK
            .iter()
            .chain(settings)
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let data = Arc::new(data);
        let (child, ready) = spawn(data.path(), &settings, says);
        Self {
            child,
            data,
            base_url: text(&ready["nodes"][0]["base_url"]),
            settings,
            live_key: text(&ready["live_key"]),
            test_key: text(&ready["test_key"]),
            email: text(&ready["email"]),
            password: text(&ready["password"]),
        }
    }

    /// Somebody with the live key.
    pub fn customer(&self) -> Customer {
        self.caller(&self.live_key)
    }

    /// Somebody with the test key.
    pub fn tester(&self) -> Customer {
        self.caller(&self.test_key)
    }

    /// Somebody with this key.
    pub fn caller(&self, key: &str) -> Customer {
        Customer::new(&self.base_url, &self.data.path().join("tls/ca.pem"), key)
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What a second start on the same folder says.
    pub fn second_start(&self) -> std::process::Output {
        let mut command = Command::new(binary());
        command.args(["dev", "--json", "--port", "0", "--data"]).arg(self.data.path());
        command.stdin(Stdio::null()).output().expect("it runs")
    }

    /// Whether its process has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it is gone");
    }

    /// SIGTERM, and waits for the end.
    pub fn terminate(&mut self) {
        let term = Command::new("kill").arg(self.child.id().to_string()).status();
        assert!(term.is_ok_and(|status| status.success()));
        self.child.wait().expect("it is gone");
    }

    /// Starts again on the same folder, after [`Node::kill`] or [`Node::terminate`].
    pub fn restart(&mut self) {
        let (child, ready) = spawn(self.data.path(), &self.settings, Stdio::inherit());
        assert!(ready["live_key"].is_null(), "keys are shown once: {ready}");
        self.child = child;
        self.base_url = text(&ready["nodes"][0]["base_url"]);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A graceful end first, so that no agent's process is left for the next test to meet.
        let _ =
            Command::new("kill").arg(self.child.id().to_string()).stderr(Stdio::null()).status();
        for _ in 0..100 {
            if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
