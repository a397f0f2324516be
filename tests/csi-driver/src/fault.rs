//! Faults of the driver's calls.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tonic::{Code, Status};

/// A fault of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// Does nothing and never replies.
    Hang,
    /// Executes the call and never replies.
    HangAfter,
    /// Replies with a gRPC code without executing the call.
    Code(i32),
    /// Executes the call and replies with a gRPC code.
    CodeAfter(i32),
    /// The process exits before it executes the call.
    DieBefore,
    /// The process exits after it has executed the call, before the reply.
    DieAfter,
    /// Reports success without executing the call.
    Lie,
}

/// A fault of one method.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// The effect on the call.
    pub fault: Fault,
    /// Number of calls with the fault; absent for all of them. A restarted process starts at zero.
    pub times: Option<u32>,
}

/// Name of the file with the faults by method.
const FILE: &str = "faults.json";

/// Replaces the faults of the driver with this state directory.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn set(state: &Path, faults: &[(&str, Fault)]) -> std::io::Result<()> {
    let rules: BTreeMap<&str, Rule> =
        faults.iter().map(|(method, fault)| (*method, Rule { fault: fault.clone(), times: None })).collect();
    set_rules(state, &rules)
}

/// Replaces the faults of the driver with this state directory, by method.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn set_rules<K: Serialize + Ord>(state: &Path, rules: &BTreeMap<K, Rule>) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(rules)?;
    quintlet_kit::atomic_file::write(&state.join(FILE), &bytes, 0o644)
}

/// Name of the file with the limit of volumes.
const MAX_VOLUMES: &str = "max-volumes";

/// Sets the limit of volumes that the driver with this state directory reports.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn set_max_volumes(state: &Path, limit: i64) -> std::io::Result<()> {
    quintlet_kit::atomic_file::write(&state.join(MAX_VOLUMES), limit.to_string().as_bytes(), 0o644)
}

/// Name of the file with the health of the volumes.
const HEALTH: &str = "health.json";

/// A condition of an unhealthy volume: number of the status, reason and message.
pub type Condition = (i32, String, String);

/// Makes the driver with this state directory report conditions of its volumes, or none. The driver needs the
/// capability `GET_VOLUME_HEALTH`.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn set_health(state: &Path, conditions: &[(i32, &str, &str)]) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(conditions)?;
    quintlet_kit::atomic_file::write(&state.join(HEALTH), &bytes, 0o644)
}

/// Name of the file with the health of the driver's storage.
const STORAGE_HEALTH: &str = "storage-health.json";

/// A condition of unhealthy storage: number of the status, reason, message, and the name of an access mode of
/// CSI if only block volumes with that mode are affected.
pub type StorageCondition = (i32, String, String, Option<String>);

/// Makes the driver with this state directory report conditions of its storage, or none. The driver needs the
/// capability `GET_STORAGE_HEALTH`.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn set_storage_health(
    state: &Path,
    conditions: &[(i32, &str, &str, Option<&str>)],
) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(conditions)?;
    quintlet_kit::atomic_file::write(&state.join(STORAGE_HEALTH), &bytes, 0o644)
}

/// Returns the fields of the requests so far, one JSON object per call.
#[must_use]
pub fn requests(state: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(state.join("contexts.log")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Returns the methods and volumes of all calls so far, as lines.
#[must_use]
pub fn calls(state: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(state.join("calls.log")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// The faults of a running driver.
#[derive(Debug)]
pub struct Faults {
    state: PathBuf,
    used: Mutex<BTreeMap<String, u32>>,
}

impl Faults {
    /// Returns the faults in a state directory.
    #[must_use]
    pub fn new(state: &Path) -> Self {
        Self { state: state.to_owned(), used: Mutex::default() }
    }

    /// Executes a call with its fault, if any.
    ///
    /// # Errors
    /// Returns the status of the fault or of the work.
    pub async fn call<T: Default>(
        &self,
        method: &str,
        volume: &str,
        work: impl FnOnce() -> Result<T, Status>,
    ) -> Result<T, Status> {
        append(&self.state.join("calls.log"), format!("{method} {volume}").trim_end());
        match self.fault_of(method) {
            None => work(),
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::HangAfter) => {
                drop(work());
                std::future::pending().await
            }
            Some(Fault::Code(code)) => Err(injected(code)),
            Some(Fault::CodeAfter(code)) => work().and_then(|_| Err(injected(code))),
            Some(Fault::DieBefore) => std::process::exit(1),
            Some(Fault::DieAfter) => {
                drop(work());
                std::process::exit(1)
            }
            Some(Fault::Lie) => Ok(T::default()),
        }
    }

    /// Returns the limit of volumes that a test has set.
    pub(crate) fn max_volumes(&self) -> Option<i64> {
        std::fs::read_to_string(self.state.join(MAX_VOLUMES)).ok()?.parse().ok()
    }

    /// Returns the conditions of volumes that a test has set.
    pub(crate) fn health(&self) -> Vec<Condition> {
        let bytes = std::fs::read(self.state.join(HEALTH)).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    /// Returns the conditions of storage that a test has set.
    pub(crate) fn storage_health(&self) -> Vec<StorageCondition> {
        let bytes = std::fs::read(self.state.join(STORAGE_HEALTH)).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    fn fault_of(&self, method: &str) -> Option<Fault> {
        let bytes = std::fs::read(self.state.join(FILE)).ok()?;
        let rules: BTreeMap<String, Rule> = serde_json::from_slice(&bytes).ok()?;
        let rule = rules.get(method)?;
        let mut used = self.used.lock();
        let count = used.entry(method.to_owned()).or_default();
        *count += 1;
        rule.times.is_none_or(|times| *count <= times).then(|| rule.fault.clone())
    }
}

fn injected(code: i32) -> Status {
    Status::new(Code::from(code), "injected by the test")
}

/// Appends a line to a log. A test that reads the log notices a missing line.
pub(crate) fn append(path: &Path, line: &str) {
    use std::io::Write as _;
    if let Ok(mut file) = std::fs::File::options().append(true).create(true).open(path) {
        let _ = writeln!(file, "{line}");
    }
}
