//! Fault injection, and behaviour that differs between runtimes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use quintlet_cri_api::v1;
use tonic::Code;

use super::{Behaviour, ExecReply, FakeRuntime, Method, Rule, RuleId};

impl FakeRuntime {
    pub(super) fn disturb(&self) {
        self.shared.disturbed.store(true, Ordering::Relaxed);
    }

    /// Returns whether a fault was ever injected.
    #[must_use]
    pub fn was_disturbed(&self) -> bool {
        self.shared.disturbed.load(Ordering::Relaxed)
    }

    /// Adds a rule behind the earlier ones, until it is removed by its ID.
    pub fn script(&self, rule: Rule) -> RuleId {
        self.disturb();
        self.shared.script.add(rule)
    }

    /// Removes a rule from the script. Calls that hang in it continue.
    pub fn unscript(&self, rule: RuleId) {
        self.shared.script.remove(rule);
    }

    /// Removes all rules.
    pub fn unscript_all(&self) {
        self.shared.script.clear();
    }

    /// Delays every call of `method`.
    pub fn latency(&self, method: Method, latency: Duration) -> RuleId {
        self.script(Rule::on(method).latency(latency))
    }

    /// Fails the next `times` calls of `method`.
    pub fn fail(&self, method: Method, code: Code, text: &str, times: u32) -> RuleId {
        self.script(Rule::on(method).fail(code, text).times(times))
    }

    /// Makes calls of `method` hang until the rule is removed.
    pub fn hang(&self, method: Method) -> RuleId {
        self.script(Rule::on(method).hang())
    }

    /// Sets whether calls whose caller disconnected complete instead of being cancelled.
    pub fn finish_abandoned_calls(&self, yes: bool) {
        self.shared.finish_abandoned.store(yes, Ordering::Relaxed);
    }

    /// Sets whether the list streams of the CRI of Kubernetes 1.36 are implemented. To simulate an upgrade,
    /// call it between [`Self::down`] and [`Self::up`].
    pub fn stream_lists(&self, yes: bool) {
        self.shared.list_streams.store(yes, Ordering::Relaxed);
    }

    /// Sets whether UpdatePodSandboxResources is implemented.
    pub fn update_sandboxes(&self, yes: bool) {
        self.shared.sandbox_updates.store(yes, Ordering::Relaxed);
    }

    /// Drops the next `count` events.
    pub fn drop_events(&self, count: u64) {
        self.disturb();
        self.shared.bus.drop_next(count);
    }

    /// Sets whether every event is sent twice.
    pub fn duplicate_events(&self, yes: bool) {
        self.shared.bus.duplicate(yes);
    }

    /// Ends every open event stream with UNAVAILABLE.
    pub fn cut_event_streams(&self) {
        self.disturb();
        self.shared.bus.cut();
    }

    /// Returns the number of open event streams.
    #[must_use]
    pub fn event_streams(&self) -> usize {
        self.shared.bus.open()
    }

    /// Moves the runtime's wall clock.
    pub fn step_wall_clock(&self, by_ns: i64) {
        self.disturb();
        self.shared.world.lock().step_clock(by_ns);
    }

    /// Makes images whose full name begins with `begin` accessible only to this user.
    pub fn protect(&self, begin: &str, user: &str, password: &str) {
        let entry = (begin.to_owned(), user.to_owned(), password.to_owned());
        self.shared.world.lock().protected.push(entry);
    }

    /// Changes an image without a call.
    pub fn edit_image(&self, name: &str, edit: impl FnOnce(&mut v1::Image)) {
        let mut world = self.shared.world.lock();
        let id = world.image(name).map(|i| i.id.clone());
        if let Some(image) = id.and_then(|id| world.images.get_mut(&id)) {
            edit(image);
        }
    }

    /// Sets the behaviour of started containers named `name`. `*` applies to all other names.
    pub fn behave(&self, name: &str, behaviour: Behaviour) {
        self.shared.world.lock().set_behaviour(name, behaviour);
    }

    /// Sets the memory usage in bytes of containers with this name, for ContainerStats.
    pub fn use_memory(&self, name: &str, bytes: u64) {
        self.shared.world.lock().memory.insert(name.to_owned(), bytes);
    }

    /// Sets the handler of ExecSync, by container ID and command.
    pub fn on_exec(&self, handler: impl Fn(&str, &[String]) -> ExecReply + Send + Sync + 'static) {
        *self.shared.exec.lock() = Arc::new(handler);
    }

    /// Sets a condition of Status, `RuntimeReady` or `NetworkReady`.
    pub fn set_condition(&self, kind: &str, status: bool, reason: &str, message: &str) {
        self.disturb();
        self.shared.world.lock().set_condition(v1::RuntimeCondition {
            r#type: kind.to_owned(),
            status,
            reason: reason.to_owned(),
            message: message.to_owned(),
        });
    }
}
