//! `k`: kill a service and watch nothing happen.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_kit::paths::Paths;
use quintlet_kit::task;
use quintlet_proto::podsync::v1::PodView;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::service::State;
use super::view::View;
use crate::health;
use crate::screen::Kills;
use crate::text::took;

/// A service that is not back by then is not waited for any longer.
const PATIENCE: Duration = Duration::from_secs(15);

/// Between two looks whether it serves again.
const STEP: Duration = Duration::from_millis(20);

/// The services in `states`, to be killed at a key.
pub(super) fn kills(
    states: Vec<(&'static str, watch::Receiver<State>)>,
    paths: Paths,
    view: watch::Receiver<View>,
) -> Kills {
    Kills {
        names: states.iter().map(|(name, _)| *name).collect(),
        kill: Box::new(move |place, reports| {
            let Some((name, state)) = states.get(place).cloned() else { return };
            let (paths, view) = (paths.clone(), view.clone());
            task::spawn("kill", kill_and_watch(name, state, paths, view, reports));
        }),
    }
}

async fn kill_and_watch(
    name: &'static str,
    mut state: watch::Receiver<State>,
    paths: Paths,
    view: watch::Receiver<View>,
    reports: mpsc::Sender<String>,
) {
    // A screen that is gone wants no report.
    let (pid, starts) = match &*state.borrow() {
        State::Running { pid, starts, .. } => (*pid, *starts),
        State::New | State::Waiting { .. } | State::Ended => {
            let _ = reports.try_send(format!("{name} does not run now"));
            return;
        }
    };
    let before = columns(&view.borrow());
    let killed = Instant::now();
    if let Err(error) = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL) {
        let _ = reports.try_send(format!("{name} (pid {pid}) cannot be killed: {error}"));
        return;
    }
    let _ = reports.try_send(format!("{name} (pid {pid}) killed …"));
    let again = async {
        let _ = state.wait_for(|s| matches!(s, State::Running { starts: n, .. } if *n > starts)).await;
        while !health::fetch(&paths).await.iter().any(|r| r.service.starts_with(name) && r.serving) {
            tokio::time::sleep(STEP).await;
        }
    };
    let report = match tokio::time::timeout(PATIENCE, again).await {
        Ok(()) => {
            let within = took(i64::try_from(killed.elapsed().as_nanos()).unwrap_or(i64::MAX));
            format!(
                "{name} killed, serves again after {within}; {}",
                compare(&before, &columns(&view.borrow()))
            )
        }
        Err(_) => format!("{name} killed, does not serve after {}s: see its log", PATIENCE.as_secs()),
    };
    let _ = reports.try_send(report);
}

/// What must not change for a service's sake, by pod.
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
            None => Some(format!("{name} is gone")),
        })
        .collect();
    if changes.is_empty() {
        return format!("{} pods, nothing happened to them", before.len());
    }
    format!("meanwhile {}", changes.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods(list: &[(&str, &str)]) -> BTreeMap<String, (String, String)> {
        list.iter().map(|(name, seen)| (format!("uid-{name}"), ((*name).into(), (*seen).into()))).collect()
    }

    #[test]
    fn what_happened_meanwhile_is_said_by_pod() {
        let before = pods(&[("web", "1/1 Running, 0 restarts"), ("once", "0/1 Completed, 0 restarts")]);
        assert_eq!(compare(&before, &before), "2 pods, nothing happened to them");
        let after = pods(&[("web", "0/1 Error, 0 restarts"), ("new", "1/1 Running, 0 restarts")]);
        assert_eq!(
            compare(&before, &after),
            "meanwhile once is gone; web: 1/1 Running, 0 restarts → 0/1 Error, 0 restarts"
        );
    }
}
