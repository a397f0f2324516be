//! Writes the cgroups of QoS classes (`pkg/kubelet/cm: qosContainerManagerImpl`).
//!
//! A write may take long: systemd may not answer, and the kernel may hold the lock of all cgroups. So a task
//! writes the newest values, and the pod manager only publishes them.

use std::sync::Arc;
use std::time::Duration;

use pod_sync_decisions::qos::QosTiers;
use quintlet_kit::task::{self, blocking};
use quintlet_kit::timers;
use tokio::sync::watch;

/// Interval of writes without a change (`pkg/kubelet/cm: periodicQOSCgroupUpdateInterval`). Another process,
/// such as systemd when it reloads its units, may have changed the values.
const PERIOD: Duration = Duration::from_secs(60);

/// Interval between attempts after a failed write.
const RETRY: Duration = Duration::from_secs(2);

/// Writes values to the cgroups. It blocks, and returns the error chain of a failure.
type Write = dyn Fn(&QosTiers) -> Result<(), String> + Send + Sync;

/// The values that the cgroups of QoS classes should have. The task that writes them ends when this is
/// dropped.
#[derive(Debug)]
pub(super) struct QosCgroups {
    wanted: watch::Sender<Option<QosTiers>>,
}

impl QosCgroups {
    /// Spawns the task.
    pub(super) fn spawn(write: impl Fn(&QosTiers) -> Result<(), String> + Send + Sync + 'static) -> Self {
        let (wanted, newest) = watch::channel(None);
        drop(task::spawn("qos-cgroups", keep(Arc::new(write), newest)));
        Self { wanted }
    }

    /// Sets the values. Returns whether they have changed.
    pub(super) fn set(&self, tiers: QosTiers) -> bool {
        self.wanted.send_if_modified(|wanted| wanted.replace(tiers) != Some(tiers))
    }
}

/// Writes the newest values, and writes them again after [`PERIOD`].
async fn keep(write: Arc<Write>, mut newest: watch::Receiver<Option<QosTiers>>) {
    loop {
        let wanted = *newest.borrow_and_update();
        let Some(tiers) = wanted else {
            if newest.changed().await.is_err() {
                return;
            }
            continue;
        };
        let write = Arc::clone(&write);
        let wait = match blocking(move || write(&tiers)).await {
            Ok(()) => PERIOD,
            Err(error) => {
                tracing::warn!(error, "QoS cgroups not written, retrying");
                RETRY
            }
        };
        // Each branch only wakes the loop, which reads the newest values.
        tokio::select! {
            changed = newest.changed() => if changed.is_err() { return },
            () = timers::pause(wait) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use parking_lot::Mutex;
    use tokio::time::{Instant, timeout};

    use super::*;

    /// Writes that a test has not taken yet.
    const WRITES: usize = 16;

    fn shares(burstable_shares: u64) -> QosTiers {
        QosTiers { burstable_shares, ..QosTiers::default() }
    }

    /// Writes that are recorded, the first of which fail.
    fn recorded(failures: usize) -> (QosCgroups, tokio::sync::mpsc::Receiver<u64>) {
        let (sender, writes) = quintlet_kit::queue::channel("test", WRITES);
        let left = Mutex::new(failures);
        let cgroups = QosCgroups::spawn(move |tiers: &QosTiers| {
            quintlet_kit::queue::offer(&sender, "test", tiers.burstable_shares).unwrap();
            let mut left = left.lock();
            if *left == 0 {
                return Ok(());
            }
            *left -= 1;
            Err("no".to_owned())
        });
        (cgroups, writes)
    }

    #[tokio::test(start_paused = true)]
    async fn a_value_is_written_at_once_again_after_a_failure_and_each_minute() {
        let (cgroups, mut writes) = recorded(1);
        let began = Instant::now();
        assert!(cgroups.set(shares(2)) && !cgroups.set(shares(2)));
        for after in [Duration::ZERO, RETRY, RETRY + PERIOD] {
            assert_eq!(writes.recv().await, Some(2));
            assert_eq!(began.elapsed().as_secs(), after.as_secs());
        }
        assert!(cgroups.set(shares(3)));
        assert_eq!(writes.recv().await, Some(3));
        assert_eq!(began.elapsed().as_secs(), (RETRY + PERIOD).as_secs(), "a change does not wait");
        drop(cgroups);
        assert_eq!(writes.recv().await, None, "the task ends with the pod manager");
    }

    #[tokio::test]
    async fn a_write_that_hangs_delays_only_the_next_write_which_has_the_newest_values() {
        let (release, hangs) = mpsc::channel::<()>();
        let (sender, mut writes) = quintlet_kit::queue::channel("test", WRITES);
        let hangs = Mutex::new(hangs);
        let cgroups = QosCgroups::spawn(move |tiers: &QosTiers| {
            quintlet_kit::queue::offer(&sender, "test", tiers.burstable_shares).unwrap();
            let _ended = hangs.lock().recv();
            Ok(())
        });
        cgroups.set(shares(2));
        assert_eq!(writes.recv().await, Some(2));
        // This thread is the only one of the runtime, so it would not get here if the write ran on it.
        for value in 3..6 {
            cgroups.set(shares(value));
            tokio::task::yield_now().await;
        }
        assert!(writes.try_recv().is_err(), "two writes at once");
        drop(release);
        let next = timeout(Duration::from_secs(10), writes.recv()).await;
        assert_eq!(next.expect("a write after the one that hung"), Some(5));
    }
}
