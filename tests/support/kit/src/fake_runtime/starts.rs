//! Starts of containers, and failed starts.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use quintlet_cri_api::v1;
use tonic::Status;

use super::FakeRuntime;
use super::event_bus::Event;
use super::script::CallScript;
use super::shared::Shared;

/// A start in flight, which excludes other starts of the container.
struct Starting<'a>(&'a Shared, &'a str);

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.0.world.lock().finish_start(self.1);
    }
}

impl Shared {
    /// Executes StartContainer.
    pub(crate) async fn start(self: &Arc<Self>, plan: &mut CallScript, id: &str) -> Result<(), Status> {
        self.world.lock().begin_start(id)?;
        let _starting = Starting(self, id);
        let passed = self.script.pass(plan).await;
        let started = passed.and_then(|()| self.world.lock().start(id));
        if started.is_err() && self.end_failed_starts.load(Ordering::Relaxed) {
            self.end_unstarted(id);
        }
        started?;
        self.started(id);
        Ok(())
    }

    /// Publishes the start of a process, and executes the container's behaviour.
    pub(crate) fn started(self: &Arc<Self>, id: &str) {
        self.touch();
        self.bus.containerd(Event::Started { id: id.to_owned() });
        self.cri_event(id, v1::ContainerEventType::ContainerStartedEvent);
        self.run_behaviour(id);
    }

    fn end_unstarted(&self, id: &str) {
        self.world.lock().end_unstarted(id);
        self.touch();
    }
}

impl FakeRuntime {
    /// Sets whether a failed start terminates its container with exit code 128, as in containerd. Otherwise
    /// the container stays created.
    pub fn end_failed_starts(&self, yes: bool) {
        self.shared.end_failed_starts.store(yes, Ordering::Relaxed);
    }

    /// Terminates a container like containerd after a failed or interrupted start.
    pub fn end_unstarted(&self, id: &str) {
        self.shared.end_unstarted(id);
    }
}
