//! Tests of the AWS profile files.

use super::*;

const CONFIG: &str = "\
[default]
region = eu-west-1 # a comment
s3 =
  addressing_style = path
  max_concurrent_requests = 20
output = json

[profile team]
region=us-west-2
endpoint_url = http://general:1
services = local
[services local]
s3 =
    endpoint_url = http://s3:1
sqs =
    endpoint_url = http://sqs:1
[profile role]
role_arn = arn:aws:iam::1:role/r
source_profile = default
[profile sso]
sso_session = corp
[profile process]
credential_process = echo '{\"Version\": 1, \"AccessKeyId\": \"P\", \"SecretAccessKey\": \"S #3\", \"Expiration\": \"2000-01-01T00:00:00Z\"}'
[profile broken]
credential_process = echo SECRET; exit 3
[profile garbled]
credential_process = echo SECRET
";

const CREDENTIALS: &str = "\
[default]
aws_access_key_id = AK
aws_secret_access_key = S/K+=
[team]
AWS_ACCESS_KEY_ID=TK
aws_secret_access_key=TS
aws_session_token = TT==
[half]
aws_access_key_id = AK
";

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join(".aws")).unwrap();
        fs::write(home.path().join(".aws/config"), CONFIG).unwrap();
        fs::write(home.path().join(".aws/credentials"), CREDENTIALS).unwrap();
        Self(home)
    }

    fn environment(&self, more: &[(&str, &str)]) -> Environment {
        let home = self.0.path().to_str().unwrap();
        std::iter::once(("HOME", home)).chain(more.iter().copied()).collect()
    }

    fn profile(&self, name: &str) -> Profile {
        Profile::load(&self.environment(&[("AWS_PROFILE", name)])).unwrap().unwrap()
    }
}

#[tokio::test]
async fn the_default_profile() {
    let files = Files::new();
    let profile = Profile::load(&files.environment(&[])).unwrap().unwrap();
    assert_eq!((profile.region(), profile.endpoint(), profile.path_style()), (Some("eu-west-1"), None, Some(true)));
    let (credential, until) = profile.credentials().await.unwrap();
    assert_eq!((credential.key_id.as_str(), credential.secret_key.as_str()), ("AK", "S/K+="));
    assert!(credential.token.is_none() && until.is_none());
}

#[tokio::test]
async fn a_named_profile_of_both_files() {
    let profile = Files::new().profile("team");
    assert_eq!((profile.region(), profile.endpoint()), (Some("us-west-2"), Some("http://s3:1")));
    let (credential, until) = profile.credentials().await.unwrap();
    assert_eq!((credential.key_id.as_str(), credential.token.as_deref()), ("TK", Some("TT==")));
    assert!(until.is_some(), "a token runs out");
}

#[tokio::test]
async fn files_can_be_elsewhere() {
    let files = Files::new();
    let path = files.0.path().join(".aws/credentials");
    let environment = Environment::from_iter([("AWS_SHARED_CREDENTIALS_FILE", path.to_str().unwrap())]);
    assert!(Profile::load(&environment).unwrap().unwrap().has_credentials());
    assert!(Profile::load(&Environment::default()).unwrap().is_none());
}

#[tokio::test]
async fn what_cannot_be_used_says_what_to_do() {
    let files = Files::new();
    for (name, message) in [
        ("role", "uses role_arn"),
        ("sso", "uses sso_session"),
        ("half", "only one of"),
        ("broken", "failed (exit status: 3)"),
        ("garbled", "wrote something other"),
    ] {
        let error = files.profile(name).credentials().await.err().unwrap();
        assert!(error.contains(message) && !error.contains("SECRET"), "{error}");
    }
    assert!(files.profile("role").credentials().await.err().unwrap().contains("export-credentials --profile role"));
    let missing = Profile::load(&files.environment(&[("AWS_PROFILE", "nobody")])).unwrap_err();
    assert!(missing.contains("\"nobody\""), "{missing}");
}

#[tokio::test]
async fn a_process_gives_credentials_until_they_expire() {
    let files = Files::new();
    let (credential, until) = files.profile("process").credentials().await.unwrap();
    assert_eq!((credential.key_id.as_str(), credential.secret_key.as_str()), ("P", "S #3"));
    assert!(until.unwrap() <= Instant::now());
    let provider = ProfileProvider::new(files.environment(&[("AWS_PROFILE", "process")]));
    assert_eq!(provider.get_credential().await.unwrap().key_id, "P");
    assert_eq!(provider.get_credential().await.unwrap().key_id, "P", "asked again after the expiration");
}

#[test]
fn a_process_that_hangs_is_killed() {
    assert!(
        run_with_timeout("exec sleep 60", Duration::from_millis(20)).unwrap_err().contains("took longer than 0.02 s")
    );
    assert_eq!(run_with_timeout("head -c 200000 /dev/zero", PROCESS_TIMEOUT).unwrap().len(), 200_000);
}

#[test]
fn nothing_secret_is_printed() {
    let files = Files::new();
    let printed = format!("{:?} {:?}", files.profile("team"), files.environment(&[("X", "TS")]));
    assert!(!printed.contains("TS") && !printed.contains("TT"), "{printed}");
}
