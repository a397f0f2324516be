//! Runs every target: on its corpus, on new inputs within a budget, and with a planted bug.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use quintlet_fuzz::bytes::corpus;
use quintlet_fuzz::fuzz::{budget, keep, one, run};
use quintlet_fuzz::targets::Target;

fn the_property_holds_for_the_corpus(target: &Target) {
    for (file, input) in corpus(target.name) {
        let checked = std::panic::catch_unwind(|| one(target.check, &input));
        assert!(matches!(checked, Ok(Ok(()))), "{file}: {checked:?}");
    }
}

fn the_property_holds_for_new_inputs(target: &Target) {
    let name = target.name;
    match run(name, target.inputs, target.check, budget()) {
        Ok(tried) => {
            println!("{name}: {tried} inputs");
            assert!(tried > 0, "no input was tried");
        }
        Err(found) => {
            let file = keep(name, &found);
            let text = String::from_utf8_lossy(&found.input);
            panic!("{}\nkept in {}: {text:?}", found.why, file.display());
        }
    }
}

/// Number of budgets after which a planted bug counts as not found. The run ends when the bug is found. A
/// budget may be wall time, and too short on a busy machine.
const PLANTED: u32 = 12;

fn a_planted_bug_is_found(target: &Target) {
    let found = run(target.name, target.inputs, target.planted, budget() * PLANTED)
        .expect_err("the bug is in every run");
    assert_eq!(one(target.check, &found.input), Ok(()), "the product has the bug too: {found:?}");
}

macro_rules! targets {
    ($($target:ident),*) => {$(
        mod $target {
            use quintlet_fuzz::targets::$target::TARGET;

            #[test]
            fn the_property_holds_for_the_corpus() {
                super::the_property_holds_for_the_corpus(&TARGET);
            }

            #[test]
            fn the_property_holds_for_new_inputs() {
                super::the_property_holds_for_new_inputs(&TARGET);
            }

            #[test]
            fn a_planted_bug_is_found() {
                super::a_planted_bug_is_found(&TARGET);
            }
        }
    )*};
}

targets!(env_file, log_query, manifest, probe_url, pull_secret, resolv_conf, spdy, websocket);
