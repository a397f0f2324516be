//! pod-sync as a process of its own that crashes at a step in the work of one pod.
//!
//! `QUINTLET_DIES_AT`: kind of the step. `QUINTLET_DIES_FOR`: `namespace/name` of the pod. `QUINTLET_DIES_BY`: `abort`, `stack`,
//! `task` (a panic outside the pod's work) or `block` (creates the file `QUINTLET_DIES_NOTE`, then blocks the thread).

use std::process::ExitCode;
use std::sync::Arc;

use quintlet_kit::contain;
use quintlet_kit::failpoint::{self, Failpoint, Observer, When};

struct Death {
    at: String,
    of: String,
    by: String,
    note: String,
}

impl Observer for Death {
    fn reached(&self, failpoint: Failpoint) {
        let is_step = failpoint.when == When::Before && failpoint.name == self.at;
        if !is_step || contain::current().is_none_or(|work| work.name() != self.of) {
            return;
        }
        match self.by.as_str() {
            "abort" => std::process::abort(),
            "stack" => {
                std::hint::black_box(deeper(0));
            }
            "task" => {
                // In another task: this thread belongs to the pod.
                let dies = async { panic!("injected into a task") };
                drop(quintlet_kit::task::spawn("dies", dies));
            }
            "block" => {
                std::fs::write(&self.note, "").expect("the note can be written");
                loop {
                    std::thread::park();
                }
            }
            _ => {}
        }
    }
}

#[expect(unconditional_recursion, reason = "it is to overflow the stack")]
fn deeper(depth: u64) -> u64 {
    let room = std::hint::black_box([depth; 64]);
    deeper(room[0].saturating_add(1)).saturating_add(depth)
}

fn main() -> ExitCode {
    let given = |name: &str| std::env::var(name).unwrap_or_default();
    let death = Death {
        at: given("QUINTLET_DIES_AT"),
        of: given("QUINTLET_DIES_FOR"),
        by: given("QUINTLET_DIES_BY"),
        note: given("QUINTLET_DIES_NOTE"),
    };
    failpoint::observe_everywhere(Arc::new(death));
    pod_sync::main()
}
