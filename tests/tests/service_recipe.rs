//! Follows the recipe of docs/SERVICE.md literally, from `serve` to pyarrow, with a real S3 server.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use stillhouse_tests::s3::{ADMIN, environment};
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::server::{Server, tool};
use stillhouse_tests::service::Service;
use stillhouse_tests::{CommandOutput, binary, corpus, root, run_command};

/// The code blocks of one kind in the recipe, in order.
fn blocks(kind: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join("docs/SERVICE.md")).unwrap();
    let (_, recipe) = text.split_once("\n## A recipe: ").expect("docs/SERVICE.md has a recipe");
    let recipe = recipe.split("\n## ").next().unwrap();
    // what follows the language says that this test runs the block
    let begin = format!("```{kind} norun: tests/tests/service_recipe.rs runs the recipe\n");
    recipe.split(&begin).skip(1).map(|part| part.split("\n```").next().unwrap().to_owned()).collect()
}

/// A command that runs a script in the job folder, as a user with this program in the `PATH`.
fn shell(script: &str, folder: &Path, service: &Service, endpoint: &str) -> Command {
    let bin = folder.join("bin");
    let mut command = Command::new("sh");
    let python = tool("python");
    let path = format!("{}:{}:{}", bin.display(), python.parent().unwrap().display(), std::env::var("PATH").unwrap());
    command.args(["-euc", script]).current_dir(folder.join("job"));
    environment(&mut command, endpoint, ADMIN);
    // unset the variables that the recipe does not set, to prove that it does not need them
    for name in ["AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AWS_REGION", "STILLHOUSE_CONFIG", "STILLHOUSE_TOKEN"] {
        command.env_remove(name);
    }
    command.env("PATH", path).env("STILLHOUSE_URL", service.api.url());
    command
}

#[test]
fn the_recipe_from_serve_to_pyarrow_works_at_the_first_try() {
    let weed = Seaweed::start();
    ["corpora", "shards"].iter().for_each(|bucket| weed.create_bucket(bucket));
    weed.s3().put("corpora", "speeches/corpus.jsonl", corpus(8, 1300).as_bytes());
    // only its address and folders are used: the recipe starts its own server
    let service = Service::new(&json!({}));
    let folder = service.scratch.path("");
    for made in ["bin", "job/tokenizer"] {
        fs::create_dir_all(folder.join(made)).unwrap();
    }
    std::os::unix::fs::symlink(binary(), folder.join("bin/stillhouse")).unwrap();
    fs::copy(stillhouse_tests::nano_teacher().join("tokenizer.json"), folder.join("job/tokenizer/tokenizer.json"))
        .unwrap();

    let here = |text: &str| text.replace("http://127.0.0.1:9000", weed.endpoint());
    let scripts = blocks("sh");
    let [serve, submit] = scripts.as_slice() else { panic!("{scripts:#?}") };
    // Replace the keys by the test's, and the address and the data folder because other tests run concurrently.
    let (keys, serve) = serve.split_once('\n').unwrap();
    assert!(keys.starts_with("export AWS_ACCESS_KEY_ID="), "{keys}");
    assert!(serve.starts_with("stillhouse serve ") && !serve.contains('\n'), "{serve}");
    let address = &service.api.url()["http://".len()..];
    let serve = format!("exec {} --listen {address} --data {}", here(serve), service.data().display());
    let mut server = Server::start(shell(&serve, &folder, &service, weed.endpoint()), &folder.join("serve.log"));
    server.wait_until("the service", || service.api.try_get("/ready").is_some_and(|a| a.status == 200));

    let job = blocks("yaml").pop().unwrap();
    fs::write(folder.join("job/recipe.yaml"), &job).unwrap();
    let done = run_command(&mut shell(&here(submit), &folder, &service, weed.endpoint())).expect(0);
    assert!(done.stdout.contains("s3://shards/recipe"), "{}", done.stdout);

    fs::write(folder.join("job/read.py"), here(&blocks("python").pop().unwrap())).unwrap();
    let read = |name: &str| -> CommandOutput {
        run_command(&mut shell(&format!("exec python {name}"), &folder, &service, weed.endpoint()))
    };
    let reported = read("read.py").expect(0).stdout;
    let rows = service.api.get("/jobs").json()["jobs"][0]["result"]["rows"].as_u64().unwrap();
    assert!(rows > 10 && reported.starts_with(&format!("{rows} rows of 64 tokens")), "{reported}");

    // for another endpoint the error names the setting, which then allows it
    fs::write(folder.join("job/other.yaml"), format!("{job}\nstorage: {{endpoint: \"http://127.0.0.1:1\"}}\n"))
        .unwrap();
    let refused = run_command(&mut shell("stillhouse submit other.yaml", &folder, &service, weed.endpoint())).expect(2);
    let line = format!("access: {{endpoints: [\"{}\", \"http://127.0.0.1:1\"]}}", weed.endpoint());
    refused.says(&["storage.endpoint: ", &line, "stillhouse serve --endpoint http://127.0.0.1:1"]);
}
