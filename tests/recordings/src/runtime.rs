//! The runtime of recordings and of comparisons.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use quintlet_cri_api::v1 as cri;
use quintlet_testkit::fake_runtime::{Behaviour, ExecReply, FakeRuntime, Options};

/// Name of the recorded node.
pub const NODE: &str = "sim-node";

/// Image of containers that pull nothing.
pub const IMAGE: &str = "example.test/app:1";

/// Names of containers that exit at once, with success.
const TASKS: [&str; 3] = ["init", "init-2", "task"];

/// Unsafe sysctls that the node allows.
pub const ALLOWED_SYSCTLS: [&str; 1] = ["net.core.somaxconn"];

/// Content of resolv.conf for pods with DNS policy Default.
pub const RESOLV_CONF: &str =
    "nameserver 192.0.2.53\nsearch example.test lab.example.test\noptions ndots:2\n";

/// The cluster's DNS server.
pub const CLUSTER_DNS: &str = "10.0.0.10";

/// The cluster's domain.
pub const CLUSTER_DOMAIN: &str = "cluster.local";

/// Returns options of a runtime with every feature.
#[must_use]
pub fn options() -> Options {
    let handler = |name: &str| cri::RuntimeHandler {
        name: name.to_owned(),
        features: Some(cri::RuntimeHandlerFeatures {
            recursive_read_only_mounts: true,
            user_namespaces: true,
        }),
    };
    Options {
        cgroup_driver: Some(cri::CgroupDriver::Cgroupfs),
        features: Some(cri::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() }),
        handlers: vec![handler(""), handler("fast")],
        ..Options::default()
    }
}

/// Prepares the runtime for the pods: the image, containers that exit, and a command `/fails-once` that fails
/// the first time.
pub fn prepare(runtime: &FakeRuntime) {
    runtime.add_image(IMAGE, 1 << 20);
    for task in TASKS {
        runtime.behave(task, Behaviour { exit: Some((Duration::ZERO, 0)), ..Behaviour::default() });
    }
    let failed = AtomicBool::new(false);
    runtime.on_exec(move |_, command| {
        let fails = command == ["/fails-once"] && !failed.swap(true, Ordering::Relaxed);
        ExecReply { exit_code: i32::from(fails), ..ExecReply::default() }
    });
}
