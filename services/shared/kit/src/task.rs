//! Named tasks.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures::FutureExt as _;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::contain::{self, Panic, Work, contained_request};

/// Spawns a task. A panic is logged with the task's name and ends the process with [`contain::EXIT_PANIC`],
/// since a restart by the supervisor is better than a service without one of its tasks.
/// [`contain::contained`] runs the work of one pod inside a task.
pub fn spawn<T, F>(name: &'static str, future: F) -> JoinHandle<T>
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    // An async block would have room for two copies of the future: the captured one, and the one that it
    // awaits.
    let named = AssertUnwindSafe(future).catch_unwind().map(move |done| match done {
        Ok(value) => value,
        Err(panic) => {
            tracing::error!(task = name, "task panicked");
            contain::uncontained(panic)
        }
    });
    #[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
    tokio::spawn(named)
}

/// Spawns a task that serves one client or one pod. A panic is logged with the pod of `work` and ends this
/// task only.
pub fn spawn_contained<T, F>(
    name: &'static str,
    work: Option<Work>,
    future: F,
) -> JoinHandle<Result<T, Panic>>
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    spawn(name, contained_request(work, future))
}

/// Runs the main future of a process. A panic ends the process as in any other task.
pub async fn main<T>(process: impl Future<Output = T>) -> T {
    contain::panics_end_process();
    match AssertUnwindSafe(process).catch_unwind().await {
        Ok(value) => value,
        Err(panic) => contain::uncontained(panic),
    }
}

/// Runs blocking work on a thread for such work. A panic is resumed in the caller, so that it counts as part
/// of the same pod's work.
///
/// Cancellation safety: work that has started is completed, and its result is dropped.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let pod = contain::current();
    #[expect(clippy::disallowed_methods, reason = "the one place that starts blocking work")]
    match tokio::task::spawn_blocking(move || contain::on_blocking_thread(pod, work)).await {
        Ok(Ok(done)) => done,
        Ok(Err(panic)) => panic.resume(),
        // The runtime is shutting down, which also drops the caller.
        Err(_) => std::future::pending().await,
    }
}

/// Tasks that are stopped and awaited together.
#[derive(Debug, Default)]
pub struct TaskGroup {
    tasks: Mutex<Vec<(&'static str, JoinHandle<()>)>>,
    stop: CancellationToken,
}

impl TaskGroup {
    /// Returns an empty group.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a token that is cancelled when the group shuts down.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Spawns a task into the group.
    pub fn spawn(&self, name: &'static str, future: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        tasks.retain(|(_, handle)| !handle.is_finished());
        tasks.push((name, spawn(name, future)));
    }

    /// Cancels [`TaskGroup::stopping`] and waits up to `grace` for all tasks. Aborts the remaining tasks and
    /// returns their names.
    pub async fn shutdown(&self, grace: Duration) -> Vec<&'static str> {
        self.stop.cancel();
        let tasks = std::mem::take(&mut *self.tasks.lock());
        let deadline = crate::clock::deadline_after(tokio::time::Instant::now(), grace);
        let mut late = Vec::new();
        for (name, mut handle) in tasks {
            if tokio::time::timeout_at(deadline, &mut handle).await.is_err() {
                handle.abort();
                late.push(name);
            }
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn blocking_work_runs_on_another_thread_and_its_panic_is_the_callers() {
        let own = std::thread::current().id();
        assert_ne!(blocking(|| std::thread::current().id()).await, own);
        let caller = spawn("caller", async { blocking(|| panic!("of the work")).await });
        let panic = caller.await.unwrap_err().into_panic();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"of the work"));
    }

    #[tokio::test]
    async fn a_panic_in_a_contained_task_is_its_result_and_names_the_pod() {
        let uid = || contain::current().map(|work| work.uid().to_owned());
        let named = spawn_contained("named", Some(Work::new("u1", "")), async move { uid() });
        assert_eq!(named.await.unwrap(), Ok(Some("u1".to_owned())));
        let panic = spawn_contained("panics", None, async { panic!("of the task") }).await.unwrap();
        let panic: Panic = panic.map(|(): ()| ()).unwrap_err();
        assert_eq!(panic.message, "of the task");
    }

    #[tokio::test(start_paused = true)]
    async fn shutdown_names_the_tasks_that_do_not_end_in_time() {
        let group = TaskGroup::new();
        group.spawn("quick", async {});
        group.spawn("stuck", std::future::pending());
        group.spawn("stops on request", group.stopping().cancelled_owned());
        assert_eq!(group.shutdown(Duration::from_secs(1)).await, ["stuck"]);
    }
}
