//! The process of status-reporter, from its command line to its exit code.

use std::process::ExitCode;

use anyhow::Context as _;
use quintlet_kit::clock::Clock;
use quintlet_kit::notify::Liveness;
use quintlet_kit::service::{self, Service};

use crate::args::Args;
use crate::run::{Config, run};

/// Runs status-reporter as its own process. Exits with 64 on a usage error.
#[must_use]
pub fn main() -> ExitCode {
    let loaded = quintlet_config::parse::<Args>(quintlet_config::table::Service::StatusReporter);
    let args = loaded.args.clone();
    let config = Config {
        observers: args.common.observer_uid.clone(),
        paths: args.common.paths(),
        settings: args.settings(),
        node_name: args.node.node_name(),
        kubeconfig: args.node.kubeconfig,
        register_node: args.register_node,
    };
    let socket = config.paths.status();
    let liveness = Liveness::of([socket.clone()]);
    let service = Service {
        name: "status-reporter",
        common: &loaded.args.common,
        node_name: Some(loaded.args.node.node_name()),
        liveness,
    };
    let serve = async |stop| {
        let served = Box::pin(run(config, Clock::system(), stop)).await;
        served.with_context(|| format!("failed to serve {}", socket.display()))
    };
    service::run(service, || loaded.publish(), serve)
}
