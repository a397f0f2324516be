//! Keeps processes in the cgroups of `kubeletCgroups` and `systemCgroups`
//! (`pkg/kubelet/cm: systemContainers`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quintlet_cgroups::{CgroupError, Cgroups, is_kernel_thread};
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_kit::backoff::Backoff;
use quintlet_kit::contain::contained_request;
use quintlet_kit::{socket, task};
use tokio_util::sync::CancellationToken;

/// Interval of moves, as in the kubelet.
const PERIOD: Duration = Duration::from_secs(60);
/// Interval after the first moves, and its growth: other services may start later than this one.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const GROWTH: f64 = 4.0;

/// Longest connection attempt to a service. A service that hangs accepts connections all the same.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Largest number of probe-service instances whose processes are looked up.
const MAX_PROBE_SERVICES: usize = 64;

/// The cgroups of processes that are not those of pods.
#[derive(Debug, Clone)]
pub struct ProcessCgroups {
    cgroups: Cgroups,
    // Empty: processes stay where they are.
    own: String,
    system: String,
    paths: Paths,
}

impl ProcessCgroups {
    /// Returns the cgroup `own` of the services (`kubeletCgroups`) and the cgroup `system` of the processes
    /// in the root cgroup (`systemCgroups`). `None` if both are empty. The services are found by their
    /// sockets in `paths`.
    #[must_use]
    pub fn new(cgroups: &Cgroups, own: &str, system: &str, paths: Paths) -> Option<Self> {
        let is_set = !own.is_empty() || !system.is_empty();
        let (own, system) = (own.to_owned(), system.to_owned());
        is_set.then(|| Self { cgroups: cgroups.clone(), own, system, paths })
    }

    /// Moves the processes once a minute, and more often at the start, until `stop`.
    pub async fn keep(self, stop: CancellationToken) {
        let mut waits = Backoff::new(FIRST_WAIT, GROWTH, PERIOD);
        loop {
            let services =
                if self.own.is_empty() { BTreeSet::new() } else { service_processes(&self.paths).await };
            let this = self.clone();
            // A panic has been logged.
            let moved = contained_request(None, task::blocking(move || this.move_all(&services))).await;
            if let Ok(Err(error)) = moved {
                let error = quintlet_kit::error_chain(&error);
                tracing::warn!(error, "processes not moved to their cgroup, retrying");
            }
            // Dropping the sleep ends the loop.
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(waits.next_wait()) => {}
            }
        }
    }

    /// Moves this process, `services`, and the processes of the root cgroup.
    fn move_all(&self, services: &BTreeSet<u32>) -> Result<(), CgroupError> {
        if !self.own.is_empty() {
            self.cgroups.move_process(&self.own, std::process::id())?;
            for pid in services {
                self.cgroups.move_process(&self.own, *pid)?;
            }
        }
        if self.system.is_empty() {
            Ok(())
        } else {
            self.cgroups.move_root_processes(&self.system, is_kernel_thread)
        }
    }
}

/// Returns the processes of the other services that run: those that listen on the sockets. A process in a PID
/// namespace that is not visible here has no ID, and PID 1 is a supervisor that listens for a service.
async fn service_processes(paths: &Paths) -> BTreeSet<u32> {
    let mut sockets = vec![paths.cri(CriSocket::Sync), paths.pleg(), paths.status(), paths.node_api()];
    sockets.extend(
        task::blocking({
            let dir = paths.probe_dir();
            move || probe_sockets(&dir)
        })
        .await,
    );
    let mut pids = BTreeSet::new();
    for path in sockets {
        let Ok(Ok(stream)) = tokio::time::timeout(CONNECT_TIMEOUT, socket::connect(&path)).await else {
            // The service does not run.
            continue;
        };
        let pid = stream.peer_cred().ok().and_then(|peer| u32::try_from(peer.pid()?).ok());
        pids.extend(pid.filter(|pid| *pid > 1));
    }
    pids
}

fn probe_sockets(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let sockets =
        entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "sock"));
    sockets.take(MAX_PROBE_SERVICES).collect()
}

#[cfg(test)]
mod tests {
    use pod_sync_decisions::qos::CgroupSettings;

    use super::*;

    #[test]
    fn this_process_and_those_of_the_root_cgroup_are_moved() {
        let root = tempfile::tempdir().unwrap();
        let files = |dir: &str, procs: &str| {
            let dir = root.path().join(dir);
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("cgroup.controllers"), "cpu\n").unwrap();
            std::fs::write(dir.join("cgroup.procs"), procs).unwrap();
        };
        let read = |dir: &str| std::fs::read_to_string(root.path().join(dir).join("cgroup.procs")).unwrap();
        let own = std::process::id().to_string();
        files("", &format!("1\n{own}\n"));
        files("kubelet", "");
        files("system", "");
        let cgroups = Cgroups::new(root.path(), "/", CgroupSettings::default());
        let new =
            |own: &str, system: &str| ProcessCgroups::new(&cgroups, own, system, Paths::new(root.path()));
        assert!(new("", "").is_none());
        let none = BTreeSet::new();
        new("/kubelet", "").unwrap().move_all(&none).unwrap();
        assert_eq!((read("kubelet"), read("system")), (own.clone(), String::new()));
        new("", "/system").unwrap().move_all(&none).unwrap();
        assert_eq!(read("system"), own);
        // The file keeps the last process that was written to it.
        files("kubelet", "");
        new("/kubelet", "").unwrap().move_all(&[7_654_321].into()).unwrap();
        assert_eq!(read("kubelet"), "7654321");
    }

    #[tokio::test]
    async fn a_service_that_starts_after_the_first_move_does_not_wait_a_minute() {
        // Processes are moved by a thread, which a paused clock does not wait for.
        quintlet_virtual_time::start();
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("kubelet")).unwrap();
        for (file, text) in [("cgroup.controllers", "cpu\n"), ("kubelet/cgroup.procs", "")] {
            std::fs::write(root.path().join(file), text).unwrap();
        }
        let procs = root.path().join("kubelet/cgroup.procs");
        let moved = || !std::fs::read_to_string(&procs).unwrap().is_empty();
        let cgroups = Cgroups::new(root.path(), "/", CgroupSettings::default());
        let processes = ProcessCgroups::new(&cgroups, "/kubelet", "", Paths::new(root.path())).unwrap();
        let stop = CancellationToken::new();
        let start = tokio::time::Instant::now();
        drop(task::spawn("keep-processes", processes.keep(stop.clone())));
        let mut times = Vec::new();
        while times.len() < 5 {
            if moved() {
                times.push(start.elapsed().as_secs());
                std::fs::write(&procs, "").unwrap();
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        stop.cancel();
        let pauses: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let near = |pause: u64, want: u64| pause.abs_diff(want) <= 2;
        assert!(
            near(pauses[0], 1) && near(pauses[1], 4) && near(pauses[2], 16) && near(pauses[3], 60),
            "{times:?}"
        );
    }

    #[tokio::test]
    async fn the_services_that_listen_on_their_sockets_are_found() {
        let run = tempfile::tempdir().unwrap();
        let paths = Paths::new(run.path());
        assert_eq!(service_processes(&paths).await, BTreeSet::new(), "no service runs");
        let bound: Vec<_> = [paths.pleg(), paths.probe("a"), paths.probe("b")]
            .iter()
            .map(|path| socket::bind_unix(path, 0o600).unwrap())
            .collect();
        std::fs::write(paths.probe_dir().join("notes"), "").unwrap();
        assert_eq!(service_processes(&paths).await, [std::process::id()].into());
        assert_eq!(probe_sockets(&paths.probe_dir()).len(), 2);
        drop(bound);
    }
}
