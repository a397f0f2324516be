//! The tasks of the process, and its end.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use quintlet_kit::task::TaskGroup;
use tokio_util::sync::CancellationToken;

use crate::start_refusal::StartRefusal;

/// The tasks of pod-sync, and what stops them.
pub(crate) struct ProcessTasks {
    group: TaskGroup,
    /// Stops the process.
    pub(super) stop: CancellationToken,
    /// The error that stopped this process after its start.
    refusal: Arc<OnceLock<StartRefusal>>,
}

impl ProcessTasks {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self { group: TaskGroup::new(), stop, refusal: Arc::default() }
    }

    /// Starts a task, which [`Self::shutdown`] waits for.
    pub(crate) fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.group.spawn(name, task);
    }

    /// Returns a function that stops the process with an error. The first error counts.
    pub(super) fn stopper(&self) -> impl FnOnce(StartRefusal) + Send + use<> {
        let (refusal, stop) = (Arc::clone(&self.refusal), self.stop.clone());
        move |error| {
            let _ = refusal.set(error);
            stop.cancel();
        }
    }

    /// Waits for the tasks, and aborts those that have not ended after `grace`. Returns their names.
    pub(crate) async fn shutdown(&self, grace: Duration) -> Vec<&'static str> {
        self.group.shutdown(grace).await
    }

    /// Returns the error that stopped this process, if one did.
    pub(crate) fn result(&self) -> anyhow::Result<()> {
        match self.refusal.get() {
            Some(StartRefusal::Enforcement(error)) => {
                Err(anyhow::Error::msg(quintlet_kit::error_chain(error)))
            }
            Some(StartRefusal::NodeName(taken)) => Err(anyhow::Error::new(taken.clone())),
            None => Ok(()),
        }
    }
}
