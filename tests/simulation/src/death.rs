//! Crashes of a process at a step in the work of one pod.
//!
//! `QUINTLET_DIES_AT`: kind of the step. `QUINTLET_DIES_FOR`: the pod, as `namespace/name` or UID.
//! `QUINTLET_DIES_BY`: `abort`, `stack`, `task` (a panic outside the pod's work) or `block` (creates the file
//! `QUINTLET_DIES_NOTE`, then blocks the thread). `QUINTLET_SLOW_AT`: kind of a step that takes 200 ms in the
//! work of the other pods, as on a machine under load.

use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::contain;
use quintlet_kit::failpoint::{self, Failpoint, Observer, When};

struct Death {
    at: String,
    of: String,
    by: String,
    note: String,
    slow_at: String,
}

impl Observer for Death {
    fn reached(&self, failpoint: Failpoint) {
        if failpoint.when != When::Before {
            return;
        }
        let Some(work) = contain::current() else { return };
        if ![work.name(), work.uid()].contains(&self.of.as_str()) {
            if failpoint.name == self.slow_at {
                std::thread::sleep(Duration::from_millis(200));
            }
            return;
        }
        if failpoint.name != self.at {
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

/// Crashes this process as its environment says.
pub fn from_environment() {
    let given = |name: &str| std::env::var(name).unwrap_or_default();
    let death = Death {
        at: given("QUINTLET_DIES_AT"),
        of: given("QUINTLET_DIES_FOR"),
        by: given("QUINTLET_DIES_BY"),
        note: given("QUINTLET_DIES_NOTE"),
        slow_at: given("QUINTLET_SLOW_AT"),
    };
    failpoint::observe_everywhere(Arc::new(death));
}
