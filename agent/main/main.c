/* The program: everything is in dm_main, so that tests can call it. */
#include "agent/agent.h"

int main(int argc, char **argv) { return dm_main(argc, argv); }
