//! Keeps threads from executing work of two suspected pods at the same time.
//!
//! Passes of suspected pods take turns, but other work of a pod does not wait for a turn: the pod manager
//! applies a change of the pod, or its logs are rotated. A crash with two suspected pods on threads could be
//! attributed to neither of them.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use quintlet_model::ids::PodUid;

/// Longest time that a thread waits for other suspected pods. A directory on a file system that hangs must
/// not stop the pod manager.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The suspected pod whose work is executed by threads.
#[derive(Debug, Default)]
pub(crate) struct ThreadGate {
    on_threads: Mutex<OnThreads>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct OnThreads {
    // Number of threads per pod. More than one pod only after a wait that was too long.
    pods: BTreeMap<PodUid, u32>,
    // A thread has waited for LONGEST_WAIT. Until all have left, no further thread waits.
    is_overdue: bool,
}

impl OnThreads {
    fn must_wait(&self, uid: &PodUid) -> bool {
        !self.is_overdue && self.pods.keys().any(|other| other != uid)
    }
}

impl ThreadGate {
    /// Waits until no thread executes work of another pod, for [`LONGEST_WAIT`] at most, and admits this
    /// thread.
    pub(crate) fn enter(&self, uid: &PodUid) {
        let mut on_threads = self.on_threads.lock();
        let waited = self.left.wait_while_for(&mut on_threads, |now| now.must_wait(uid), LONGEST_WAIT);
        on_threads.is_overdue |= waited.timed_out();
        let threads = on_threads.pods.entry(uid.clone()).or_default();
        *threads = threads.saturating_add(1);
    }

    /// Records that a thread that was admitted has left.
    pub(crate) fn leave(&self, uid: &PodUid) {
        let mut on_threads = self.on_threads.lock();
        if let Some(threads) = on_threads.pods.get_mut(uid) {
            *threads = threads.saturating_sub(1);
        }
        on_threads.pods.retain(|_, threads| *threads > 0);
        if on_threads.pods.is_empty() {
            on_threads.is_overdue = false;
        }
        drop(on_threads);
        self.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;

    use super::*;

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    // Enters in a thread of its own.
    fn enters(gate: &Arc<ThreadGate>, name: &str) -> mpsc::Receiver<()> {
        let (entered, has_entered) = mpsc::channel();
        let (gate, uid) = (Arc::clone(gate), uid(name));
        std::thread::spawn(move || {
            gate.enter(&uid);
            let _ = entered.send(());
        });
        has_entered
    }

    #[test]
    fn a_thread_waits_while_work_of_another_pod_is_executed_and_not_for_its_own_pod() {
        let gate = Arc::new(ThreadGate::default());
        gate.enter(&uid("a"));
        enters(&gate, "a").recv_timeout(LONGEST_WAIT).expect("another thread of the same pod");
        let b = enters(&gate, "b");
        gate.leave(&uid("a"));
        assert!(b.recv_timeout(LONGEST_WAIT / 10).is_err(), "a thread executes work of `a`");
        gate.leave(&uid("a"));
        b.recv_timeout(LONGEST_WAIT * 10).expect("no thread executes work of `a`");
        gate.leave(&uid("b"));
        assert!(gate.on_threads.lock().pods.is_empty());
    }

    #[test]
    fn work_that_blocks_holds_up_one_thread_for_a_second_and_further_threads_not_at_all() {
        let gate = Arc::new(ThreadGate::default());
        gate.enter(&uid("blocked"));
        enters(&gate, "b").recv_timeout(LONGEST_WAIT * 10).expect("it is admitted after the longest wait");
        assert!(gate.on_threads.lock().is_overdue);
        for name in ["c", "d", "e"] {
            gate.enter(&uid(name));
        }
        for name in ["b", "c", "d", "e", "blocked"] {
            gate.leave(&uid(name));
        }
        let now = gate.on_threads.lock();
        assert!(now.pods.is_empty() && !now.is_overdue);
    }
}
