// What the compose tool's `config --format=json` prints, by the library in that tool: quick to build.
//
//	compose-config FILE ENV_FILE [PROFILE ...]
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("usage: compose-config FILE ENV_FILE [PROFILE ...]")
	}
	options, err := cli.NewProjectOptions(args[:1],
		cli.WithEnvFiles(args[1]), cli.WithDotEnv, cli.WithProfiles(args[2:]), cli.WithResolvedPaths(true))
	if err != nil {
		return err
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		return err
	}
	text, err := project.MarshalJSON()
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(text)
	return err
}
