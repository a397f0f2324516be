//! Manages slices with `systemctl`, which waits for the job and spares nodes without systemd a D-Bus library.

use std::path::{Path, PathBuf};
use std::process::Command;

use quintlet_model::qos::{self, PodCgroup};

use super::CgroupError;

/// systemd rounds CPU time to hundredths of a CPU (10 ms per second).
const QUOTA_STEP_US: i64 = 10_000;

#[derive(Debug, Clone)]
pub(super) struct Systemd {
    program: PathBuf,
    unified: bool,
}

impl Systemd {
    pub(super) fn new(program: &Path, unified: bool) -> Self {
        Self { program: program.to_owned(), unified }
    }

    /// Starts a slice and its parents. A running slice is not changed.
    pub(super) fn start(&self, unit: &str) -> Result<(), CgroupError> {
        self.run("start", unit, &[])
    }

    /// Stops a slice without processes.
    pub(super) fn stop(&self, unit: &str) -> Result<(), CgroupError> {
        self.run("stop", unit, &[])
    }

    /// Sets the limits of a slice until it stops.
    pub(super) fn set(&self, unit: &str, values: &PodCgroup) -> Result<(), CgroupError> {
        let properties = properties(values, self.unified);
        if properties.is_empty() { Ok(()) } else { self.run("set-property", unit, &properties) }
    }

    fn run(&self, what: &'static str, unit: &str, properties: &[String]) -> Result<(), CgroupError> {
        let problem = |problem: String| CgroupError::Systemd { what, unit: unit.to_owned(), problem };
        let runtime = (what == "set-property").then_some("--runtime");
        let output = Command::new(&self.program)
            .args(["--no-ask-password", what])
            .args(runtime)
            .arg(unit)
            .args(properties)
            .output()
            .map_err(|e| problem(format!("{}: {e}", self.program.display())))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(problem(if said.is_empty() { output.status.to_string() } else { said }))
    }
}

fn properties(values: &PodCgroup, unified: bool) -> Vec<String> {
    let limit = |v: i64| if v < 0 { "infinity".to_owned() } else { v.to_string() };
    let shares = values.cpu_shares.map(|shares| {
        if unified {
            format!("CPUWeight={}", qos::shares_to_weight(shares))
        } else {
            format!("CPUShares={shares}")
        }
    });
    let memory = values
        .memory_bytes
        .map(|bytes| format!("{}={}", if unified { "MemoryMax" } else { "MemoryLimit" }, limit(bytes)));
    let quota = values.cpu_quota_us.map(|quota| {
        let period = values.cpu_period_us.map_or(100_000, |p| i64::try_from(p).unwrap_or(100_000)).max(1);
        match quota {
            ..=0 => "CPUQuota=".to_owned(),
            quota => {
                let per_second = quota.saturating_mul(1_000_000).checked_div(period).unwrap_or(i64::MAX);
                let steps =
                    (per_second / QUOTA_STEP_US).saturating_add(i64::from(per_second % QUOTA_STEP_US > 0));
                format!("CPUQuota={steps}%")
            }
        }
    });
    let period = values.cpu_period_us.map(|us| format!("CPUQuotaPeriodSec={us}us"));
    let tasks = values.pids.map(|pids| format!("TasksMax={}", limit(pids)));
    [shares, quota, period, memory, tasks].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn limits_are_properties_in_the_words_of_each_version() {
        let values = PodCgroup {
            cpu_shares: Some(1024),
            cpu_quota_us: Some(50_001),
            cpu_period_us: Some(100_000),
            memory_bytes: Some(1 << 20),
            pids: Some(7),
            ..PodCgroup::default()
        };
        let common = ["CPUQuota=51%", "CPUQuotaPeriodSec=100000us"];
        let [v1, v2] = [false, true].map(|unified| properties(&values, unified));
        assert_eq!(v1, ["CPUShares=1024", common[0], common[1], "MemoryLimit=1048576", "TasksMax=7"]);
        assert_eq!(v2, ["CPUWeight=39", common[0], common[1], "MemoryMax=1048576", "TasksMax=7"]);
        let unlimited = PodCgroup { cpu_quota_us: Some(-1), memory_bytes: Some(-1), ..PodCgroup::default() };
        assert_eq!(properties(&unlimited, true), ["CPUQuota=", "MemoryMax=infinity"]);
        assert!(properties(&PodCgroup::default(), true).is_empty());
    }

    #[test]
    fn systemd_properties_are_set_and_its_errors_are_returned() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("systemctl");
        let log = dir.path().join("log");
        let script = format!(
            "#!/bin/sh\necho \"$*\" >> {}\ncase \"$*\" in *bad*) echo no such unit >&2; exit 4;; esac\n",
            log.display()
        );
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let systemd = Systemd::new(&program, true);
        systemd.start("a.slice").unwrap();
        systemd.set("a.slice", &PodCgroup { pids: Some(5), ..PodCgroup::default() }).unwrap();
        systemd.set("a.slice", &PodCgroup::default()).unwrap();
        systemd.stop("a.slice").unwrap();
        assert_eq!(
            std::fs::read_to_string(&log).unwrap(),
            "--no-ask-password start a.slice\n--no-ask-password set-property --runtime a.slice TasksMax=5\n--no-ask-password stop a.slice\n"
        );
        assert_eq!(
            systemd.start("bad.slice").unwrap_err().to_string(),
            "systemd: start bad.slice: no such unit"
        );
        let absent = Systemd::new(&dir.path().join("absent"), true).start("a.slice").unwrap_err().to_string();
        assert!(absent.contains("absent"), "{absent}");
    }
}
