//! The state that the calls, the events and the handle of the fake runtime share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use quintlet_cri_api::v1;
use tokio::sync::watch;

use super::event_bus::{Bus, Event};
use super::options::{ExecReply, Options};
use super::script::Script;
use super::world::World;

type ExecHandler = Arc<dyn Fn(&str, &[String]) -> ExecReply + Send + Sync>;

pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) world: Mutex<World>,
    pub(crate) script: Script,
    pub(crate) bus: Bus,
    pub(crate) exec: Mutex<ExecHandler>,
    /// Counts changes of the state, to wake waiting tasks.
    pub(crate) changed: watch::Sender<u64>,
    pub(crate) finish_abandoned: AtomicBool,
    pub(super) end_failed_starts: AtomicBool,
    /// Whether list streams are implemented.
    pub(crate) list_streams: AtomicBool,
    /// Whether UpdatePodSandboxResources is implemented.
    pub(crate) sandbox_updates: AtomicBool,
    pub(crate) disturbed: AtomicBool,
}

impl Shared {
    /// Returns the state of a runtime without pods.
    pub(super) fn new(options: Options) -> Self {
        Self {
            world: Mutex::new(World::new(options.wall_base_unix_ns)),
            script: Script::default(),
            bus: Bus::new(options.containerd_events, options.cri_events),
            exec: Mutex::new(Arc::new(|_, _| ExecReply::default())),
            changed: watch::Sender::new(0),
            finish_abandoned: AtomicBool::new(false),
            end_failed_starts: AtomicBool::new(false),
            list_streams: AtomicBool::new(false),
            sandbox_updates: AtomicBool::new(false),
            disturbed: AtomicBool::new(false),
            options,
        }
    }

    pub(crate) fn touch(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    /// Ends the process of a container or sandbox: publishes the containerd event and, after the lag, changes
    /// the CRI state.
    pub(crate) fn exit(self: &Arc<Self>, id: &str, code: i32, reason: Option<&str>) -> bool {
        if !self.world.lock().begin_exit(id) {
            return false;
        }
        self.bus.containerd(Event::Exit { id: id.to_owned(), exec_id: None, code });
        let lag = self.options.exit_lag;
        if lag.is_zero() {
            self.finish_exit(id, code, reason);
        } else {
            let shared = Arc::clone(self);
            let id = id.to_owned();
            let reason = reason.map(str::to_owned);
            crate::spawn(async move {
                tokio::time::sleep(lag).await;
                shared.finish_exit(&id, code, reason.as_deref());
            });
        }
        true
    }

    fn finish_exit(&self, id: &str, code: i32, reason: Option<&str>) {
        self.world.lock().finish_exit(id, code, reason);
        self.touch();
        self.bus.containerd(Event::TaskDeleted { id: id.to_owned(), code });
        self.cri_event(id, v1::ContainerEventType::ContainerStoppedEvent);
    }

    pub(crate) fn cri_event(&self, id: &str, kind: v1::ContainerEventType) {
        // The event has the whole pod, so it is created only for subscribers.
        if !self.options.cri_events {
            return;
        }
        if let Some(event) = self.world.lock().cri_event(id, kind) {
            self.bus.cri(event);
        }
    }

    /// Ends the process of `id` according to its behaviour.
    pub(crate) fn run_behaviour(self: &Arc<Self>, id: &str) {
        let Some((after, code)) = self.world.lock().behaviour_of(id).exit else { return };
        let (shared, id) = (Arc::clone(self), id.to_owned());
        crate::spawn(async move {
            tokio::time::sleep(after).await;
            shared.exit(&id, code, None);
        });
    }

    /// Waits until `done` holds for the state.
    pub(crate) async fn wait_world(&self, mut done: impl FnMut(&World) -> bool) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if done(&self.world.lock()) {
                return;
            }
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    pub(crate) fn sandbox_events(&self, id: &str) {
        self.bus.containerd(Event::Created { id: id.to_owned() });
        self.bus.containerd(Event::Started { id: id.to_owned() });
        self.cri_event(id, v1::ContainerEventType::ContainerCreatedEvent);
        self.cri_event(id, v1::ContainerEventType::ContainerStartedEvent);
    }

    pub(crate) fn remove(&self, id: &str) {
        let all = self.world.lock().remove(id);
        for gone in all {
            self.bus.containerd(Event::Deleted { id: gone.id });
            if let Some(event) = gone.event {
                self.bus.cri(event);
            }
        }
        self.touch();
    }
}
