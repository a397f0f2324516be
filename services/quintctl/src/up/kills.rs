//! Kills a service on the key `k` of the live table and reports the effect on the pods.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintctl_text::took;
use quintlet_kit::args::paths::Paths;
use quintlet_kit::task;
use quintlet_proto::podsync::v1::PodView;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::names;
use super::service::ServiceState;
use crate::health;
use crate::screen::Kills;
use crate::view::View;

/// Longest wait for a killed service to serve again.
const RECOVERY_LIMIT: Duration = Duration::from_secs(15);

/// Interval of health checks of a killed service.
const CHECK_PERIOD: Duration = Duration::from_millis(20);

/// Returns the services of `states` and the function that kills one of them.
pub(super) fn kills(
    states: Vec<(&'static str, watch::Receiver<ServiceState>)>,
    paths: Paths,
    view: watch::Receiver<View>,
) -> Kills {
    Kills {
        names: states.iter().map(|(name, _)| *name).collect(),
        kill: Box::new(move |place, reports| {
            let Some((name, state)) = states.get(place).cloned() else { return };
            let processes: Vec<_> = states.iter().map(|(name, _)| *name).collect();
            let killed = KilledService { name, processes, paths: paths.clone() };
            task::spawn("kill", kill_and_watch(killed, state, view.clone(), reports));
        }),
    }
}

/// The service to kill, and what its health is found by.
struct KilledService {
    name: &'static str,
    /// All supervised processes.
    processes: Vec<&'static str>,
    paths: Paths,
}

impl KilledService {
    async fn is_healthy(&self) -> bool {
        let rows = health::fetch(&self.paths).await;
        rows.iter().any(|row| row.serving && names::is_row_of(self.name, &row.service, &self.processes))
    }
}

async fn kill_and_watch(
    service: KilledService,
    mut state: watch::Receiver<ServiceState>,
    view: watch::Receiver<View>,
    reports: mpsc::Sender<String>,
) {
    let name = service.name;
    // Sending fails only if the screen has ended or does not keep up; a lost report is not an error.
    let (pid, starts) = match &*state.borrow() {
        ServiceState::Running { pid, starts, .. } => (*pid, *starts),
        ServiceState::New | ServiceState::Waiting { .. } | ServiceState::Ended => {
            let _ = quintlet_kit::queue::offer(&reports, "kills", format!("{name} is not running"));
            return;
        }
    };
    let before = columns(&view.borrow());
    let killed = Instant::now();
    if let Err(error) = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL) {
        let _ = quintlet_kit::queue::offer(
            &reports,
            "kills",
            format!("failed to kill {name} (pid {pid}): {error}"),
        );
        return;
    }
    let _ = quintlet_kit::queue::offer(&reports, "kills", format!("{name} (pid {pid}) killed …"));
    let again = async {
        let _ = state.wait_for(|s| matches!(s, ServiceState::Running { starts: n, .. } if *n > starts)).await;
        while !service.is_healthy().await {
            tokio::time::sleep(CHECK_PERIOD).await;
        }
    };
    let report = match tokio::time::timeout(RECOVERY_LIMIT, again).await {
        Ok(()) => {
            let within = took(i64::try_from(killed.elapsed().as_nanos()).unwrap_or(i64::MAX));
            format!(
                "{name} killed, serves again after {within}; {}",
                compare(&before, &columns(&view.borrow()))
            )
        }
        Err(_) => format!("{name} killed, not serving after {}s; see its log", RECOVERY_LIMIT.as_secs()),
    };
    let _ = quintlet_kit::queue::offer(&reports, "kills", report);
}

/// Returns the name and the state of each pod, by UID. A restart of a service must not change them.
fn columns(view: &View) -> BTreeMap<String, (String, String)> {
    let seen = |p: &PodView| format!("{} {}, {} restarts", p.ready, p.status, p.restarts);
    view.pods.iter().map(|(uid, p)| (uid.clone(), (p.name.clone(), seen(p)))).collect()
}

fn compare(
    before: &BTreeMap<String, (String, String)>,
    after: &BTreeMap<String, (String, String)>,
) -> String {
    let changes: Vec<String> = before
        .iter()
        .filter_map(|(uid, (name, was))| match after.get(uid) {
            Some((_, is)) if is == was => None,
            Some((_, is)) => Some(format!("{name}: {was} → {is}")),
            None => Some(format!("{name} removed")),
        })
        .collect();
    if changes.is_empty() {
        return format!("{} pods unchanged", before.len());
    }
    format!("changed meanwhile: {}", changes.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods(list: &[(&str, &str)]) -> BTreeMap<String, (String, String)> {
        list.iter().map(|(name, seen)| (format!("uid-{name}"), ((*name).into(), (*seen).into()))).collect()
    }

    #[test]
    fn changes_of_pods_are_reported_by_pod() {
        let before = pods(&[("web", "1/1 Running, 0 restarts"), ("once", "0/1 Completed, 0 restarts")]);
        assert_eq!(compare(&before, &before), "2 pods unchanged");
        let after = pods(&[("web", "0/1 Error, 0 restarts"), ("new", "1/1 Running, 0 restarts")]);
        assert_eq!(
            compare(&before, &after),
            "changed meanwhile: once removed; web: 1/1 Running, 0 restarts → 0/1 Error, 0 restarts"
        );
    }
}
