//! Restarts of services with other settings, and a reboot of the node.

use std::ffi::OsString;
use std::path::Path;

use futures::future::join_all;
use nix::mount::MsFlags;
use nix::sys::signal::Signal;
use quintlet_test_runtime::Faults as _;

use crate::Node;
use crate::bins::SERVICES;
use crate::service::{Boot, Service};
use crate::wait::LONG;

impl Node {
    /// Stops a service with SIGTERM until it is started again.
    ///
    /// # Panics
    /// Panics if it does not stop.
    pub async fn end_service(&mut self, name: &str) {
        let service = self.services.get_mut(name).expect("a service of this node");
        assert!(service.terminate().await, "{name} does not end after SIGTERM");
    }

    /// Starts a stopped service with other values of some flags, and waits until it serves.
    ///
    /// # Panics
    /// It does not serve.
    pub async fn start_service(&mut self, name: &'static str, flags: &[(&str, &str)]) {
        let mut plan = self.services[name].plan.clone();
        for (flag, value) in flags {
            set_flag(&mut plan.args, flag, value);
        }
        self.services.insert(name, Service::start(plan));
        self.wait_serving(name, LONG).await;
    }

    /// Replaces a service by the binary of the same name in `dir`, with SIGTERM as an upgrade does, and waits
    /// until it serves.
    ///
    /// # Panics
    /// It does not stop, or does not serve.
    pub async fn run_from(&mut self, name: &'static str, dir: &Path) {
        self.end_service(name).await;
        let mut plan = self.services[name].plan.clone();
        plan.binary = dir.join(name);
        self.services.insert(name, Service::start(plan));
        self.wait_serving(name, LONG).await;
    }

    /// Removes what a reboot removes: services, runtime, pods, mounts, interfaces, cgroups, and the files in
    /// /run. Files on disk stay.
    ///
    /// # Panics
    /// Something cannot be removed.
    pub async fn power_off(&mut self) {
        // All services are signalled before the first one is waited for.
        join_all(self.services.values_mut().map(|s| s.end(Signal::SIGKILL, LONG))).await;
        self.containerd.power_off().await;
        std::fs::remove_dir_all(self.paths.run()).expect("what is in memory is gone");
    }

    /// Starts the runtime and all services in another boot: with another boot ID, and a CLOCK_BOOTTIME that
    /// begins now. Only the runtime is waited for.
    ///
    /// # Panics
    /// The machine's uptime cannot be read, or something cannot be started.
    pub async fn boot(&mut self) {
        let id = self.base.path().join("boot-id");
        let new = std::fs::read("/proc/sys/kernel/random/uuid").expect("the kernel makes ids");
        std::fs::write(&id, new).expect("a file can be written");
        let uptime = std::fs::read_to_string("/proc/uptime").expect("the kernel has an uptime");
        let began = uptime.split('.').next().and_then(|s| s.parse().ok()).expect("the uptime is a number");
        // pod-sync would do this itself, but visible only to processes of its boot.
        share(&self.root_dir());
        self.containerd.launch().await.expect("the private containerd starts again");
        for name in SERVICES {
            let mut plan = self.services[name].plan.clone();
            plan.boot = Some(Boot { id: id.clone(), began });
            self.services.insert(name, Service::start(plan));
        }
    }
}

fn set_flag(args: &mut Vec<OsString>, flag: &str, value: &str) {
    match args.iter().position(|arg| arg == flag) {
        Some(at) => args[at + 1] = value.into(),
        None => args.extend([flag, value].map(OsString::from)),
    }
}

fn share(dir: &Path) {
    let none = None::<&Path>;
    nix::mount::mount(Some(dir), dir, none, MsFlags::MS_BIND, none).expect("root can mount");
    nix::mount::mount(none, dir, none, MsFlags::MS_SHARED, none).expect("a mount can be shared");
}
